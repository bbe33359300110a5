"""One download of a teacher for all processes that share a cache, told while it lasts."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from wandistill.units import MIB

_TELL_SECONDS = 10.0


def fetched_once(lock: Path, download: Callable[[], Path]) -> Path:
    """The folder that `download` makes, called by one process at a time; those that waited take what it made.

    Where a file system knows no locks, or does not let us write, every process downloads: the hub's own locks still
    keep two from writing one file.

    Args:
        lock: a file beside the cache, that holds the folder once it is whole.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return download()
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
        waited = _lock(file.fileno())
        made = Path(file.read().strip() or "/nowhere")
        if waited and made.is_dir():
            return made
        file.seek(0)
        file.truncate()
        folder = download()
        file.write(f"{folder}\n")
        return folder


def _lock(descriptor: int) -> bool:
    """Takes the lock, which closing gives back; returns whether another process had it."""
    with suppress(OSError):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return True
    return False


@contextmanager
def told(folder: Path, total: Callable[[], int], tell: Callable[[int, int], None]) -> Iterator[None]:
    """Within it the size of a growing folder is told every ten seconds, whoever fills it.

    Args:
        total: bytes in the end, asked once; 0 where nothing is missing. An error means that nothing is told.
        tell: gets MiB that are there and MiB in all.
    """
    over = threading.Event()

    def watch() -> None:
        with suppress(Exception):  # the download itself tells what is wrong
            whole = total()
            while whole and not over.wait(_TELL_SECONDS):
                tell(min(size_of(folder), whole) // MIB, whole // MIB)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder, links not followed; those that come and go meanwhile are left out."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            found += 0 if path.is_symlink() or path.is_dir() else path.stat().st_blocks * 512
    return found
