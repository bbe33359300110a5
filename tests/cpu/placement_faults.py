"""Faults that the placements' suite must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from wandistill.teacher import feeds, record_reader, sharded
from wandistill.teacher import stage as stages
from wandistill.teacher.base import Expert
from wandistill.teacher.layout import Record
from wandistill.teacher.split_fetch import SplitStream
from wandistill.teacher.transport import Transport


@contextmanager
def no_fault() -> Iterator[None]:
    yield


@contextmanager
def misread(change: Callable[[Record], Record]) -> Iterator[None]:
    """Other weights are read than are asked for."""
    read = record_reader.RecordReader.read

    def wrong(self: record_reader.RecordReader, record: Record, buffer: Tensor) -> None:
        read(self, change(record), buffer)

    with patch.object(record_reader.RecordReader, "read", wrong):
        yield


def swap(record: Record) -> Record:
    return Record(record.expert, {0: 1, 1: 0}.get(record.block, record.block))


def wrong_expert() -> Any:
    other = {Expert.HIGH: Expert.LOW, Expert.LOW: Expert.HIGH}
    return misread(lambda record: Record(other[record.expert], record.block))


@contextmanager
def swapped_part() -> Iterator[None]:
    """What peers hold of blocks 0 and 1 changes places."""
    expect = sharded.ShardSlots.expect

    def wrong(self: sharded.ShardSlots, records: Sequence[Record]) -> None:
        expect(self, [swap(record) for record in records])

    with patch.object(sharded.ShardSlots, "expect", wrong):
        yield


@contextmanager
def stale_slot() -> Iterator[None]:
    """A slot is given back, and filled anew, before its block is computed."""

    def hasty(take: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        def taken(self: Any, wait: bool = True) -> Tensor:
            slot = take(self)
            give(self)
            for item in getattr(self, "_coming", ()):
                item[1]()  # what is on its way arrives
            return slot

        return taken

    def give(self: Any) -> None:
        self._free.append((self._out.popleft(), None))
        self._load(wait=False) if isinstance(self, feeds.Slots) else self._load()

    def too_late(self: Any, done: Any) -> None:
        """It was given back already."""

    with (
        patch.object(feeds.Slots, "take", hasty(feeds.Slots.take)),
        patch.object(feeds.Slots, "give", too_late),
        patch.object(sharded.ShardSlots, "take", hasty(sharded.ShardSlots.take)),
        patch.object(sharded.ShardSlots, "give", too_late),
    ):
        yield


@contextmanager
def stale_part() -> Iterator[None]:
    """Ranks read each other's parts before these are there: those of the record that was in the slot before."""
    gather = Transport.gather

    def early(self: SplitStream, target: Tensor, source: Tensor, after: Any) -> None:
        parts = target.view(self._transport.size, -1)
        gather(self._transport, parts)
        with patch.object(Transport, "gather", lambda *arguments: None):
            copy(self, target, source, after)

    copy = SplitStream.copy
    with patch.object(SplitStream, "copy", early):
        yield


@contextmanager
def stale_state(*, inputs: bool = False) -> Iterator[None]:
    """A stage computes the batch before the one that it was given, as if its buffer had not been filled anew."""
    run = stages.Stage.run
    former: dict[int, Any] = {}

    def late(self: stages.Stage, expert: Expert, entering: Any, features: Any) -> stages.StageOutput:
        if isinstance(entering, tuple) is inputs:
            before, former[id(self)] = former.get(id(self), entering), entering
            shapes = [[t.shape for t in e] if inputs else e.hidden.shape for e in (before, entering)]
            entering = before if shapes[0] == shapes[1] else entering
        return run(self, expert, entering, features)

    with patch.object(stages.Stage, "run", late):
        yield


FAULTS: dict[str, Callable[[], Any]] = {
    "": no_fault,
    "swapped block": lambda: misread(swap),
    "swapped part": swapped_part,
    "wrong expert": wrong_expert,
    "stale slot": stale_slot,
    "stale part": stale_part,
    "stale state": stale_state,
    "stale input": lambda: stale_state(inputs=True),
}
