"""A part of the README that is made from the code: printed, written (--write) or compared (--check)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def replaced(readme: str, begin: str, part: str, end: str) -> str:
    """The README with `part` in place of what stands between the lines `begin` and `end`."""
    head, rest = readme.split(begin)
    return head + begin + part + end + rest.split(end)[1]


def main(renewed: Callable[[str], str], part: Callable[[], str]) -> None:
    """Does what the flag on the command line says."""
    there = README.read_text(encoding="utf-8")
    if "--write" in sys.argv:
        README.write_text(renewed(there), encoding="utf-8")
    elif "--check" in sys.argv:
        if renewed(there) != there:
            sys.exit("out of date: README.md; run make generate and commit what it changes.")
    else:
        print(part())
