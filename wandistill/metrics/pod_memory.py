"""Memory of this container and of /dev/shm, as samples of the pod's metrics."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from wandistill.launch.cgroup import MemoryCgroup


def container_samples(
    cgroup: MemoryCgroup | None = None, shm: Path = Path("/dev/shm")
) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, own labels and value of each; what the kernel does not tell is left out.

    Args:
        cgroup: that of the container; None: this process's.
        shm: where shared memory is mounted.
    """
    cgroup = cgroup or MemoryCgroup.own()
    if cgroup is not None:
        for state, name in (("usage", cgroup.names.usage), ("peak", cgroup.names.peak)):
            with contextlib.suppress(OSError, ValueError):
                yield "wandistill_pod_memory_bytes", {"state": state}, int((cgroup.folder / name).read_text())
        limit = cgroup.tightest()
        if limit is not None:
            yield "wandistill_pod_memory_bytes", {"state": "limit"}, limit.limit
        for share, seconds in _pressure(cgroup.folder / "memory.pressure"):
            yield "wandistill_pod_memory_pressure_seconds_total", {"share": share}, seconds
        yield "wandistill_pod_oom_kills_total", {}, cgroup.oom_kills()
    with contextlib.suppress(OSError):
        space = os.statvfs(shm)
        yield "wandistill_pod_shm_bytes", {"state": "size"}, space.f_blocks * space.f_frsize
        yield "wandistill_pod_shm_bytes", {"state": "used"}, (space.f_blocks - space.f_bfree) * space.f_frsize


def _pressure(path: Path) -> Iterator[tuple[str, float]]:
    """Share and seconds of lines such as `some avg10=0.00 avg60=0.00 avg300=0.00 total=12345` (microseconds)."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text(encoding="ascii").splitlines():
            share, *fields = line.split()
            yield share, int(dict(field.split("=", 1) for field in fields)["total"]) / 1e6
