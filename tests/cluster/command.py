"""The command line of what starts and ends a cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping

from tests.cluster.local.init import StartError
from tests.tools.build import BuildError


def run(about: str, actions: Mapping[str, Callable[[], object]], *errors: type[Exception]) -> int:
    """Does the action that the command line names; what keeps it from that is said without a traceback.

    Args:
        about: for the help; its first line.
        errors: that say enough by themselves, beside those of starting and of building.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("action", choices=tuple(actions))
    try:
        actions[parser.parse_args().action]()
    except (StartError, BuildError, *errors) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
