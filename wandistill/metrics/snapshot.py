"""A rank's snapshot: one small JSON file that the rank replaces every second and the pod's endpoint reads.

Ages are taken from the kernel's monotonic clock, which all processes of a node share, so a jump of the wall clock
changes nothing. A snapshot belongs to a process: once that is gone (process id and start time tell), its file is
removed, and its series with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PREFIX, _SUFFIX = "rank-", ".json"
# A rank writes a few kilobytes; anything much larger is no snapshot.
_LARGEST = 1 << 18

Sample = tuple[dict[str, str], Any]  # own labels; a number, or {"counts": [...], "sum": s} of a histogram


@dataclass
class Snapshot:
    """What a rank tells of itself: samples by the names of `wandistill.metrics.names`."""

    rank: int
    local_rank: int
    node_rank: int
    pid: int
    pid_start: int
    monotonic: float = 0.0
    wall: float = 0.0
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def age(self) -> float:
        """Seconds since it was written."""
        return max(time.monotonic() - self.monotonic, 0.0)

    def clock_jump(self) -> float:
        """Seconds that the wall clock moved against the monotonic one since it was written."""
        return (time.time() - self.wall) - (time.monotonic() - self.monotonic)


def mine(rank: int, local_rank: int, node_rank: int) -> Snapshot:
    """An empty snapshot of this process."""
    pid = os.getpid()
    return Snapshot(rank, local_rank, node_rank, pid, process_start(pid) or 0)


def write(folder: Path, snapshot: Snapshot) -> bool:
    """Replaces the rank's file; returns False if the disk refuses, which leaves the former whole."""
    snapshot.monotonic, snapshot.wall = time.monotonic(), time.time()
    final = folder / _name(snapshot)
    partial = folder / f".{final.name}.{snapshot.pid}"
    try:
        partial.write_text(json.dumps(vars(snapshot)), encoding="utf-8")
        os.replace(partial, final)
    except OSError:
        # The folder itself may be gone or read-only.
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        return False
    return True


def _name(snapshot: Snapshot) -> str:
    return f"{_PREFIX}{snapshot.rank}{_SUFFIX}"


def read_all(folder: Path) -> list[Snapshot]:
    """The snapshots of the ranks that live, by rank; files of dead ones are removed, others passed over."""
    found = []
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    for name in names:
        path = folder / name
        if name.startswith(f".{_PREFIX}"):
            _remove_partial(path)
        if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
            continue
        snapshot = _read(path)
        if snapshot is None:
            continue
        if process_start(snapshot.pid) != snapshot.pid_start:
            _remove(path, snapshot)
        elif name == _name(snapshot):  # else its series would be there twice
            found.append(snapshot)
    return sorted(found, key=lambda snapshot: snapshot.rank)


def process_start(pid: int) -> int | None:
    """When a process began, in the kernel's ticks; None if it is gone, or dead and not yet waited for."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold anything, parentheses too.
    state, *fields = text.rsplit(")", 1)[1].split()
    return None if state in "ZX" else int(fields[18])


def _read(path: Path) -> Snapshot | None:
    try:
        if path.stat().st_size > _LARGEST:
            return None
        snapshot = Snapshot(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    numbers = (snapshot.rank, snapshot.local_rank, snapshot.node_rank, snapshot.pid, snapshot.pid_start)
    times = (snapshot.monotonic, snapshot.wall)
    good = all(isinstance(n, int) for n in numbers) and all(isinstance(t, int | float) for t in times)
    return snapshot if good and isinstance(snapshot.samples, dict) else None


def _remove(path: Path, dead: Snapshot) -> None:
    """Removes a dead rank's file, unless a new process of that rank has written meanwhile."""
    current = _read(path)
    if current is None or current.pid != dead.pid:
        return
    # Where that cannot be, the file is passed over at each scrape instead.
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _remove_partial(path: Path) -> None:
    """Removes a file that a rank was writing when it died."""
    pid = path.suffix.removeprefix(".")
    if pid.isdecimal() and process_start(int(pid)) is None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
