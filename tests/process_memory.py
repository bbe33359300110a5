"""The memory that processes occupy together, by their own doing."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ")


def occupied_bytes(processes: Sequence[int], folder: Path) -> int:
    """Proportional set sizes of `processes` (PIDs), summed: a page that two of them map counts half for each.

    Counted are anonymous memory, shared memory (/dev/shm, memfd) and mapped files below `folder`. Programs and
    libraries are not: any process of the machine may map their pages, so a part of them changes hands whenever an
    unrelated one starts or ends, by more than what is measured here.

    The processes stand still meanwhile, else a page that one maps between two readings counts one and a half times.
    One that is gone counts nothing.
    """
    alive = []
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)
            alive.append(process)
    try:
        return sum(_occupied(process, folder) for process in alive)
    finally:
        for process in alive:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


def _occupied(process: int, folder: Path) -> int:
    place = Path("/proc", str(process))
    try:
        fields = dict(line.split(":", 1) for line in (place / "smaps_rollup").read_text().splitlines()[1:])
        kib = sum(_kib(fields[name]) for name in ("Pss_Anon", "Pss_Shmem"))
        if f"{folder}/" in (place / "maps").read_text():
            kib += _mapped_kib((place / "smaps").read_text(), folder)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return kib * 1024


def _mapped_kib(smaps: str, folder: Path) -> int:
    kib, counted = 0, False
    for line in smaps.splitlines():
        if _MAPPING.match(line):
            counted = f"{folder}/" in line
        elif counted and line.startswith("Pss:"):
            kib += _kib(line.split(":", 1)[1])
    return kib


def _kib(value: str) -> int:
    return int(value.split()[0])
