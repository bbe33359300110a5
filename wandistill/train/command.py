"""`wandistill train`."""

from __future__ import annotations

import argparse
import os

from wandistill import config
from wandistill.errors import OutOfMemory
from wandistill.launch.causes import cause_of
from wandistill.launch.forecast import check_job

# Where torch reads how its GPU allocator works, the older name last: the only one that all its versions know.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All settings of `TrainConfig`."""
    config.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Trains; returns 0.

    Raises:
        WandistillError: with the exit code and the sentence for the user.
    """
    settings = config.from_arguments(args)
    check_job(settings)
    set_allocator()
    # Imported here, so that --help, a wrong flag and a run that cannot fit are answered at once.
    from wandistill.train.run import train

    try:
        train(settings)
    except RuntimeError as error:
        # Before the ranks have met there is nobody to tell, and nothing was planned.
        cause = cause_of(error)
        if cause is None:
            raise
        raise OutOfMemory(f"memory ran out before the run began: {cause.message}") from error
    return 0


def set_allocator() -> None:
    """Sets how torch's GPU allocator works in this process and those that it starts, unless the user has set it.

    Segments of fixed sizes break up under tensors that come and go, and then more is reserved than was planned.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[-1]] = "expandable_segments:True"
