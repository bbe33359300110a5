"""A command line with other settings in it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from wandistill.config import FIELDS, PLACEMENT_ALIASES


def with_settings(flags: Sequence[str], changes: Mapping[str, object]) -> list[str]:
    """The flags of `wandistill train` with `changes` (values by a setting's name) in place of what they said of these.

    The rest stays as it was written.
    """
    dropped = {name: name in FIELDS and isinstance(FIELDS[name].default, bool) for name in changes}
    if "teacher_device_strategy" in changes:
        dropped |= dict.fromkeys(PLACEMENT_ALIASES, True)
    kept: list[str] = []
    skip = False
    for flag in flags:
        if skip:
            skip = False
            continue
        name = flag.split("=", 1)[0].removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        name = name if name in dropped else name.removeprefix("no_")
        if name in dropped:
            skip = "=" not in flag and not dropped[name]
            continue
        kept.append(flag)
    for name, value in changes.items():
        kept += [f"--{name}" if value else f"--no_{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return kept


def shown(command: Sequence[str]) -> str:
    """A command as it is typed into a shell."""
    return shlex.join(command)
