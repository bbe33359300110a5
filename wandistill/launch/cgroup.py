"""The memory limit of this process's cgroup, what is used of it, and how often the kernel killed there.

Versions 1 and 2 of cgroups. A container's limit is its cgroup's; the machine's own totals say nothing about it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

# Version 1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Names:
    """What a version calls its files."""

    limit: str
    usage: str
    peak: str
    events: str


_VERSIONS = {
    1: Names("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    2: Names("memory.max", "memory.current", "memory.peak", "memory.events"),
}


@dataclass(frozen=True)
class Limit:
    """A cgroup with a limit, at one moment."""

    limit: int  # bytes
    usage: int  # bytes, page cache included
    reclaimable: int  # bytes of it that the kernel gives up before it kills: inactive page cache

    @property
    def used(self) -> int:
        """Bytes that the kernel cannot take back."""
        return max(self.usage - self.reclaimable, 0)

    @property
    def room(self) -> int:
        """Bytes that are left."""
        return self.limit - self.used


@dataclass(frozen=True)
class MemoryCgroup:
    """The memory cgroup of a process.

    Args:
        folder: of the process's own cgroup, or of the hierarchy's root where a container hides it.
        root: of the hierarchy as it is mounted.
        version: 1 or 2.
    """

    folder: Path
    root: Path
    version: int

    @classmethod
    def own(
        cls, membership: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/sys/fs/cgroup")
    ) -> MemoryCgroup | None:
        """That of this process; None where no memory controller can be read."""
        try:
            lines = membership.read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        found = None
        for line in lines:
            _, controllers, name = line.split(":", 2)
            if "memory" in controllers.split(","):
                found = cls._below(mounts / "memory", name, 1)
            elif not controllers and found is None:
                found = cls._below(mounts, name, 2)
        return found

    @classmethod
    def _below(cls, root: Path, name: str, version: int) -> MemoryCgroup | None:
        usage = _VERSIONS[version].usage
        folder = root / name.lstrip("/")
        # Inside a container the name may be that outside of it; the root is then all there is to see. The root of a
        # machine's version 2 has no usage, nor a limit.
        for place in (folder, root):
            if (place / usage).is_file():
                return cls(place, root, version)
        return None

    @property
    def names(self) -> Names:
        """What this version calls its files."""
        return _VERSIONS[self.version]

    def limits(self) -> list[Limit]:
        """This cgroup and its ancestors, as far as they have a limit and can be seen."""
        names = self.names
        found = []
        for place in (self.folder, *self.folder.parents):
            with contextlib.suppress(OSError, ValueError):
                most = (place / names.limit).read_text(encoding="ascii").strip()
                if most.isdigit() and int(most) < _NO_LIMIT:
                    used = int((place / names.usage).read_text(encoding="ascii"))
                    found.append(Limit(int(most), used, _pairs(place / "memory.stat").get("inactive_file", 0)))
            if place == self.root:
                break
        return found

    def tightest(self) -> Limit | None:
        """The limit that leaves the least room; None where there is none."""
        return min(self.limits(), key=lambda limit: limit.room, default=None)

    def oom_kills(self) -> int:
        """How many processes the kernel killed here for memory so far."""
        try:
            return _pairs(self.folder / self.names.events).get("oom_kill", 0)
        except OSError:
            return 0


def _pairs(path: Path) -> dict[str, int]:
    """The lines `name number` of a file."""
    words = path.read_text(encoding="ascii").split()
    return {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
