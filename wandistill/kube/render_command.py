"""`wandistill render`: the objects of a values file, as `helm template` would give them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wandistill.errors import ConfigError
from wandistill.kube import values
from wandistill.kube.job import Object, render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The values, as for helm."""
    add_values(parser)


def add_values(parser: argparse.ArgumentParser) -> None:
    """The flags of a values file and of single values."""
    parser.add_argument(
        "-f", "--values", action="append", default=[], metavar="FILE", help="values file; a later one wins"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="one value, such as pools.main.placement=stream",
    )
    parser.add_argument("--name", default="wandistill", help="name of the release (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Prints the objects as YAML.

    Raises:
        ConfigError: values that break a rule.
    """
    print(to_yaml(render(read(args), args.name)), end="")
    return 0


def read(args: argparse.Namespace) -> dict[str, Any]:
    """The values that the flags give, complete."""
    layers = [values.load(Path(path)) for path in args.values]
    return values.resolve(*layers, *(_single(text) for text in args.set))


def to_yaml(objects: Sequence[Object]) -> str:
    """Documents of YAML, texts of several lines as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Without anchors, for people to read."""

        def ignore_aliases(self, data: object) -> bool:
            """A part that occurs twice is written twice."""
            return True

    def text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)

    Dumper.add_representer(str, text)
    return yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=10_000, explicit_start=True)


def _single(text: str) -> dict[str, Any]:
    """A map with one value, typed as YAML would."""
    import yaml

    path, sign, value = text.partition("=")
    if not sign or not path:
        raise ConfigError(f"--set {text}: write PATH=VALUE, such as pools.main.placement=stream.")
    made: Any = yaml.load(value, Loader=values.loader())
    for key in reversed(path.split(".")):
        made = {key: made}
    assert isinstance(made, dict)
    return made
