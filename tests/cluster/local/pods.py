"""The processes of a container of the local cluster, seen from this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tests.cluster.local import layout
from tests.cluster.local.cgroups import hierarchies

SPARED, FIRST = "0", "1000"


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


def doom_supervisor(container: str) -> None:
    """Makes the kernel choose a container's first process where memory runs out, and so all of them.

    So it goes on cgroup version 2, where the kubelet asks for it; with version 1 the kernel takes one process, the
    largest.
    """
    for pid, inside in processes(container).items():
        with suppress(OSError):
            Path("/proc", str(pid), "oom_score_adj").write_text(FIRST if inside == 1 else SPARED)
