"""How much host memory there is, and what a rank's memory holds at one moment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wandistill.launch.cgroup import Limit, MemoryCgroup
from wandistill.units import format_bytes


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank; those of a GPU are None without one."""

    rank: int
    phase: str
    resident: int  # host memory of the process
    limit: int | None = None  # of its cgroup
    allocated: int | None = None  # by torch
    reserved: int | None = None
    total: int | None = None  # of the GPU
    free: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As files hold it."""
        return {
            "rank": self.rank,
            "phase": self.phase,
            "allocated_bytes": self.allocated,
            "reserved_bytes": self.reserved,
            "total_bytes": self.total,
            "free_bytes": self.free,
            "host_rss_bytes": self.resident,
            "host_limit_bytes": self.limit,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RankMemory:
        """From what `to_json` gave."""
        return cls(
            content["rank"],
            content["phase"],
            content["host_rss_bytes"],
            content["host_limit_bytes"],
            content["allocated_bytes"],
            content["reserved_bytes"],
            content["total_bytes"],
            content["free_bytes"],
        )

    def __str__(self) -> str:
        host = f"host {format_bytes(self.resident)}"
        if self.limit is not None:
            host += f" (limit of the node {format_bytes(self.limit)})"
        if self.total is None or self.allocated is None or self.reserved is None or self.free is None:
            return f"rank {self.rank}, in phase {self.phase}: {host}"
        return (
            f"rank {self.rank}, in phase {self.phase}: {format_bytes(self.allocated)} allocated, "
            f"{format_bytes(self.reserved)} reserved, {format_bytes(self.total)} total, "
            f"{format_bytes(self.free)} free; {host}"
        )


def resident_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def limit_bytes() -> int | None:
    """The tightest limit of this process's cgroup; None where there is none."""
    group = MemoryCgroup.own()
    limit = group.tightest() if group else None
    return limit.limit if limit else None


def available_bytes() -> int:
    """Memory that this process may still take: what the machine has available, or what its cgroups leave if less.

    Page cache counts as available, since the kernel gives it up.
    """
    return max(min([_machine_bytes("MemAvailable"), *(limit.room for limit in _limits())]), 0)


def whole_bytes() -> int:
    """Memory that all processes here could have together: the machine's, or its cgroups' least limit if less."""
    return min([_machine_bytes("MemTotal"), *(limit.limit for limit in _limits())])


def _limits() -> list[Limit]:
    group = MemoryCgroup.own()
    return group.limits() if group else []


def _machine_bytes(name: str) -> int:
    """A field of /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return {key: int(value.split()[0]) * 1024 for key, value in (line.split(":", 1) for line in lines)}[name]
