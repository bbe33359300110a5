"""Notices at once when another rank of the job is gone, and says which.

A rank that dies leaves the others waiting: in gloo for an error that names no rank, in NCCL for the timeout of the
group, many minutes. So each rank keeps one connection to the next, the last to the first, on a gloo group of its own,
and a thread waits there for a farewell. A connection that closes without one is a lost rank: the first to see it
writes its name into the job's store, so that the ranks which fall one after the other all tell the same cause.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from wandistill.errors import ExitCode, PeerLost
from wandistill.launch import records

_log = logging.getLogger(__name__)

_STORE_KEY = "wandistill/lost_rank"
_NAMING_SECONDS = 5.0
_FOREVER = timedelta(days=365)
_DISTRIBUTED = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")


class PeerWatch:
    """Watches the next rank of the job from a thread until `close`.

    All ranks must make it at the same point, since it makes a process group. In a world of one it does nothing.

    Args:
        grace_seconds: the main thread gets this long to end by itself, with its own error, once a rank is lost; it
            cannot when it waits for a GPU that waits for the lost rank.
    """

    def __init__(self, grace_seconds: float = 20.0) -> None:
        self._grace = grace_seconds
        # Told of the lost rank before the grace begins.
        self.on_lost: Callable[[int | None], None] = lambda rank: None
        self._closed = threading.Event()
        self._group: dist.ProcessGroup | None = None
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._rank, size = dist.get_rank(), dist.get_world_size()
        self._next, self._previous = (self._rank + 1) % size, (self._rank - 1) % size
        group = dist.new_group(backend="gloo", timeout=_FOREVER)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        threading.Thread(target=self._wait, name="peer-watch", daemon=True).start()

    def _wait(self) -> None:
        farewell = torch.zeros(1, dtype=torch.uint8)
        try:
            dist.recv(farewell, src=self._next, group=self._group)
        except RuntimeError:
            if self._closed.is_set():
                return
            lost = _error(_name_lost(self._next))
            self.on_lost(lost.rank)
            if not self._closed.wait(self._grace):
                _log.error(f"error: {lost}")
                records.leave(ExitCode.PEER_LOST, str(lost))
                records.end_process(ExitCode.PEER_LOST)

    def close(self, *, orderly: bool = True) -> None:
        """Ends the watch; waits for nobody. To be called before the process groups are destroyed.

        Args:
            orderly: this rank leaves as all do, and says farewell; else the others learn that they lost it.
        """
        if self._group is None or self._closed.is_set():
            return
        self._closed.set()
        if orderly:
            with suppress(RuntimeError):  # the one to tell is gone
                dist.send(torch.ones(1, dtype=torch.uint8), dst=self._previous, group=self._group)


@contextmanager
def peer_errors() -> Iterator[None]:
    """Turns the errors that torch.distributed raises when a connection breaks into `PeerLost`."""
    try:
        yield
    except RuntimeError as error:
        raise _error(_lost_rank()) from error


def peer_lost(error: BaseException) -> PeerLost | None:
    """The error to raise in place of `error`, if that is how torch.distributed says that a connection broke."""
    if not isinstance(error, RuntimeError) or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    text = str(error)
    # gloo's errors have no type of their own, and name the file that raised them; backward wraps them.
    if not isinstance(error, dist.DistError) and not any(word in text for word in _DISTRIBUTED):
        return None
    # NCCL's word for a call that can never work, such as two ranks on one GPU.
    if "ncclInvalidUsage" in text:
        return None
    return _error(_lost_rank())


def _error(rank: int | None) -> PeerLost:
    who = "another rank" if rank is None else f"rank {rank}"
    return PeerLost(
        f"{who} is gone in the middle of the run, or the network to it; this rank cannot go on. See that rank's log "
        "for the reason; the same command goes on from the last checkpoint.",
        rank,
    )


def _name_lost(rank: int) -> int:
    """Writes `rank` as the lost one, unless another is written there already; returns the one that is."""
    try:
        return int(_store().compare_set(_STORE_KEY, "", str(rank)).decode())
    except RuntimeError:  # the store went with its rank
        return rank


def _lost_rank() -> int | None:
    """The lost rank: as the watching rank writes it into the store within a few seconds."""
    deadline = time.monotonic() + _NAMING_SECONDS
    with suppress(RuntimeError):  # the store went with its rank
        store = _store()
        # Not `wait`, which keeps the thread that wants to write the name from the connection to the store.
        while time.monotonic() < deadline:
            if store.check([_STORE_KEY]):
                return int(store.get(_STORE_KEY).decode())
            time.sleep(0.1)
    return None


def _store() -> dist.Store:
    # A key of its own is all that is needed; torch has no public way to the store of the default group.
    return dist.distributed_c10d._get_default_store()
