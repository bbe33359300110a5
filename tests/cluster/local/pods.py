"""The processes of a container of the local cluster, seen from this machine."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.cluster.local import layout
from tests.cluster.local.cgroups import hierarchies

# Of a container's memory: its ranks train by then, and its launcher has written down what they asked of the planner.
MUCH = 0.75


def processes(container: str) -> dict[int, int]:
    """Process ids on this machine of a container -> the ids that the container itself sees."""
    found = {}
    for hierarchy in hierarchies("cgroup", "cgroup2"):
        for group in (hierarchy / layout.CGROUP).glob(f"**/{container}"):
            for pid in (group / "cgroup.procs").read_text().split():
                with suppress(OSError):  # it may end meanwhile, here and below
                    status = Path("/proc", pid, "status").read_text()
                    (ids,) = [line for line in status.splitlines() if line.startswith("NSpid:")]
                    found[int(pid)] = int(ids.split()[-1])
    return found


def kill_whole(container: str, seconds: float = 3) -> None:
    """Ends a container as the kernel kills a process of it for memory; to be called again and again until then.

    So it goes on cgroup version 2, where the kubelet asks for it. With version 1 the kernel takes one process, and the
    first one would answer: it is stopped when most of the memory is used, and killed after the other.

    Args:
        seconds: for which the container is watched closely, since a rank fills what is left of its memory in less time
            than a question to the API server takes.
    """
    groups, deadline = _memory_groups(container), time.monotonic() + seconds
    firsts = [pid for pid, inside in processes(container).items() if inside == 1]
    while firsts and time.monotonic() < deadline:
        for group in groups:
            with suppress(OSError):  # it may end meanwhile
                if _oom_kills(group):
                    _signal(firsts, signal.SIGKILL)
                    return
                if _used_share(group) > MUCH:
                    _signal(firsts, signal.SIGSTOP)
        time.sleep(0.01)


def _signal(pids: list[int], how: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, how)


def _memory_groups(container: str) -> list[Path]:
    """The container's cgroup that counts memory, of version 1 or 2."""
    found = [
        group
        for hierarchy in hierarchies("cgroup", "cgroup2")
        for group in (hierarchy / layout.CGROUP).glob(f"**/{container}")
    ]
    return [group for group in found if (group / "memory.limit_in_bytes").exists() or (group / "memory.max").exists()]


def _used_share(group: Path) -> float:
    used, limit = ("memory.usage_in_bytes", "memory.limit_in_bytes")
    if not (group / used).exists():
        used, limit = ("memory.current", "memory.max")
    return int((group / used).read_text()) / int((group / limit).read_text())


def _oom_kills(group: Path) -> int:
    """How many processes of the group the kernel has killed."""
    name = "memory.oom_control" if (group / "memory.limit_in_bytes").exists() else "memory.events"
    counts = dict(line.split() for line in (group / name).read_text().splitlines())
    return int(counts["oom_kill"])
