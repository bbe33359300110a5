"""The test cluster's own cgroups: made before the kubelets start, removed after everything in them has ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.cluster.local import layout

ROOT = Path("/sys/fs/cgroup")


def make_cgroups() -> None:
    """One group for each node, in every hierarchy of version 1 or in the one of version 2."""
    for hierarchy in hierarchies("cgroup2" if (ROOT / "cgroup.controllers").exists() else "cgroup"):
        for path in (hierarchy / layout.CGROUP, *(hierarchy / layout.CGROUP / node for node in layout.NODES)):
            path.mkdir(exist_ok=True)
            _prepare(path)
            _weigh(path)


def remove_cgroups(seconds: float = 20) -> None:
    """Removes them, the deepest first; a group whose last process is just ending is tried again.

    Raises:
        OSError: a group is still in use after `seconds`.
    """
    deadline = time.monotonic() + seconds
    for hierarchy in hierarchies("cgroup", "cgroup2"):
        top = hierarchy / layout.CGROUP
        for folder, _, _ in os.walk(top, topdown=False):
            while Path(folder).exists():
                try:
                    os.rmdir(folder)
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)


def hierarchies(*kinds: str) -> list[Path]:
    """Where the hierarchies of these kinds are mounted; runc makes groups in version 2's beside those of version 1."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [Path(fields[1]) for fields in mounts if fields[2] in kinds]


def _weigh(path: Path) -> None:
    """Beside the machine's other processes, a group of many weighs as much as one of them if this is not set."""
    for name, weight in (("cpu.shares", 4096), ("cpu.weight", 400)):
        if (path / name).exists():
            (path / name).write_text(str(weight))


def _prepare(path: Path) -> None:
    parent = path.parent
    if (parent / "cgroup.controllers").exists():
        controllers = (parent / "cgroup.controllers").read_text().split()
        (parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
    # A cpuset of version 1 begins empty, and an empty one takes no process.
    elif (path / "cpuset.cpus").exists():
        for name in ("cpuset.cpus", "cpuset.mems"):
            (path / name).write_text((parent / name).read_text())
