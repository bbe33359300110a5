"""One run at a time writes into an output directory: a lock that ends with its holder, however that ends.

It is a flock(2), which kernels keep for local disks and hand on to the server of a shared one (NFS, CephFS, Lustre), so
it holds between machines and is free as soon as its holder was killed. The file tells who holds it, and stays. A server
that lost a whole machine gives its locks back after a lease; until then a start waits for it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from wandistill.errors import ConfigError

_log = logging.getLogger(__name__)

# Of the run: its launcher on node 0, or without a launcher its rank 0.
RUN = ".lock"
# Of rank 0 below a launcher, whose ranks outlive it for the moment that their last checkpoint takes.
RANKS = ".lock-ranks"
# Seconds to wait for a holder that is not seen to run here: NFS gives a lost machine's locks back after 90, CephFS
# after 60.
PATIENCE = 120.0
_INTERVAL = 0.5


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    host: str
    machine: str  # its kernel, and the process numbers that it sees; two pods of one name differ
    pid: int
    command: str
    since: str

    @classmethod
    def own(cls, command: str) -> Holder:
        """This process."""
        return cls(socket.gethostname(), _machine(), os.getpid(), command, time.strftime("%Y-%m-%d %H:%M:%S %z"))

    @property
    def runs_here(self) -> bool:
        """Whether it is a living process beside this one."""
        if self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except OSError as error:
            return isinstance(error, PermissionError)  # another user's
        return True

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host} ({self.command}), since {self.since}"


@contextmanager
def held(output_dir: Path, command: str, name: str = RUN) -> Iterator[None]:
    """Holds the directory within the body. A directory that cannot be used is told by those that write into it.

    Args:
        command: what holds it, for those that are refused.
        name: the lock's file.

    Raises:
        ConfigError: another run holds it; the message names its process and host.
    """
    descriptor = _open(output_dir, name)
    if descriptor is None:
        yield
        return
    try:
        _take(descriptor, output_dir, command, name)
        yield
    finally:
        os.close(descriptor)


def _open(output_dir: Path, name: str) -> int | None:
    with suppress(OSError):
        output_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(output_dir / name, os.O_RDWR | os.O_CREAT, 0o666)
        # Whoever may write the directory may go on with the run, as another user too.
        with suppress(OSError):
            os.fchmod(descriptor, output_dir.stat().st_mode & 0o666)
        return descriptor
    return None


def _take(descriptor: int, output_dir: Path, command: str, name: str) -> None:
    began, told = time.monotonic(), False
    try:
        while not _locked(descriptor):
            holder = _holder(descriptor)
            here = name == RUN and holder is not None and holder.runs_here
            if here or time.monotonic() - began > PATIENCE:
                raise ConfigError(
                    f"--output_dir {output_dir}: another run writes there, {holder or 'which has not told its name'}. "
                    "Wait for its end or stop it, or give another --output_dir. A run that was killed holds nothing."
                )
            if not told:
                _log.warning(
                    f"{output_dir} is held by {holder or 'another run'}: waiting up to {PATIENCE:.0f} s for it"
                )
                told = True
            time.sleep(_INTERVAL)
    except OSError as error:
        _log.warning(f"{output_dir} knows no locks ({error.strerror}): nothing keeps a second run from writing there")
        return
    with suppress(OSError):  # a full disk: the lock holds without a name
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{json.dumps(asdict(Holder.own(command)))}\n".encode(), 0)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> Holder | None:
    """What the holder wrote; None in the moment before it has."""
    with suppress(OSError, ValueError, TypeError):
        return Holder(**json.loads(os.pread(descriptor, 1 << 16, 0)))
    return None


def _machine() -> str:
    with suppress(OSError):
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{kernel} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
