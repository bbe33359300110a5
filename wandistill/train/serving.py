"""The rank that only computes the teacher for the others (`--teacher_rank_trains no`), and how they lead it.

It has no data, no student and no part in the ranks' group; it places the teacher when the others do, answers until they
close it, and ends when they end, as they end. The first rank that trains tells it so through the job's store, which
both can look into when they like: filling caches may take hours in which the teacher's rank has nothing to do, longer
than a process group waits.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import torch.distributed as dist

from wandistill.errors import WandistillError
from wandistill.teacher.base import Teacher
from wandistill.teacher.pipeline import PipelineTeacher
from wandistill.train.loop import StopSignals

_PLACE = "place"
_SIGNAL, _ENDED = "signal", "ended"
_POLL_SECONDS = 0.1
# How long the one who leads stays for the answer to its last word: it may be the one that holds the store.
_FAREWELL_SECONDS = 10.0


class Lead:
    """The first training rank's end of the line."""

    def __init__(self) -> None:
        self._store = _line()
        self._orders = 0

    def place(self) -> None:
        """Lets the teacher's rank place the teacher, as all other ranks are about to."""
        self._give(_PLACE)

    def end(self, error: WandistillError | None = None) -> None:
        """Lets the teacher's rank end: well, or with the error that this rank ends with."""
        with suppress(RuntimeError):  # that rank, or the store, is gone already
            self._give(pickle.dumps(error).hex())
            deadline = time.monotonic() + _FAREWELL_SECONDS
            while not self._store.check([_ENDED]) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)

    def stop_signal(self) -> int | None:
        """The signal that the teacher's rank got, if it did."""
        return int(self._store.get(_SIGNAL)) if self._store.check([_SIGNAL]) else None

    def _give(self, order: str) -> None:
        self._store.set(f"order {self._orders}", order)
        self._orders += 1


def serve(place: Callable[[], Teacher]) -> None:
    """What the teacher's rank does while the others train.

    Args:
        place: places the teacher, on all ranks together.

    Raises:
        WandistillError: what the others ended with.
    """
    store = _line()
    with StopSignals(lambda number: store.set(_SIGNAL, str(number))):
        for number in count():
            order = _take(store, f"order {number}")
            if order != _PLACE:
                break
            teacher = place()
            assert isinstance(teacher, PipelineTeacher)
            teacher.serve()
            teacher.close()
    store.set(_ENDED, "")
    error = pickle.loads(bytes.fromhex(order))
    if error is not None:
        raise error


def _line() -> dist.Store:
    # A connection of its own: a call that waits on another blocks all that share it.
    return dist.PrefixStore("wandistill/teacher_rank", dist.distributed_c10d._get_default_store().clone())


def _take(store: dist.Store, order: str) -> str:
    # Not `wait`, during which no signal is noted.
    while not store.check([order]):
        time.sleep(_POLL_SECONDS)
    return store.get(order).decode()
