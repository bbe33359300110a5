"""Changes of the trainer's settings as the helm command that makes them in a release."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

RELEASE, RUN, POOL = "WANDISTILL_RELEASE", "WANDISTILL_RUN", "WANDISTILL_POOL"
_DIGEST = re.compile(r"-[0-9a-f]{8}$")


def upgrade(release: str, pools: Sequence[str], changes: Mapping[str, object]) -> str:
    """The command. What it makes is another job, which begins anew.

    Args:
        pools: of the job; the first is the one that it is named after.
        changes: values by the names of `wandistill train`.
    """
    sets = []
    for name, value in changes.items():
        text = str(value).lower() if isinstance(value, bool) else str(value).replace(",", "\\,")
        sets += [f"--set {key}={text}" for key in _keys(name, pools)]
    return f"helm upgrade {release} helm/wandistill --reuse-values {' '.join(sets)}"


def upgrade_here(changes: Mapping[str, object]) -> str:
    """The command for the release that this pod belongs to; empty outside of one."""
    release, run = os.environ.get(RELEASE, ""), os.environ.get(RUN, "")
    if not release or not run.startswith(f"{release}-"):
        return ""
    named = _DIGEST.sub("", run.removeprefix(f"{release}-"))
    return upgrade(release, list(dict.fromkeys([named, os.environ.get(POOL) or named])), changes)


def _keys(name: str, pools: Sequence[str]) -> list[str]:
    if name == "teacher_device_strategy":
        return [f"pools.{pools[0]}.placement"]
    if name == "teacher_dtype":
        return [f"pools.{pool}.dtype" for pool in pools]
    return ["student.config"] if name == "student_config" else [f"training.{name}"]
