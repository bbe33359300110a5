"""Feeds: where a placement's records come from, one after the other, in the order in which they are asked for.

A feed is told early which records it will be asked for (`expect`), so that it works ahead as far as its memory goes.
Feeds are put together: `Slots(Mapped(copy))` streams from the host copy to a GPU, `Slots(ReadAhead(read, buffers))`
from disk; on a CPU `Mapped(copy)` or `ReadAhead(read, buffers)` alone is enough, since the records are computed with
where they lie.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from wandistill.models.held import hold
from wandistill.teacher.copy_stream import CopyStream, Mark
from wandistill.teacher.host_copy import HostCopy
from wandistill.teacher.layout import Record


class Feed(Protocol):
    """A source of records."""

    def expect(self, records: Sequence[Record]) -> None:
        """Says that `records` will be taken, in this order, after all that were expected before."""
        ...

    def take(self, wait: bool = True) -> Tensor | None:
        """The bytes of the next record, uint8; compute enqueued from now on finds them there. They are valid until
        they are given back. None: not there yet, and `wait` is False."""
        ...

    def give(self, done: Mark | None) -> None:
        """Gives back the record that was taken first of those that are out; its memory is used anew once `done` has
        passed."""
        ...

    def close(self) -> None:
        """Ends threads and frees buffers; nothing that was taken is valid any more."""
        ...


class Mapped:
    """Records of a host copy, where they lie."""

    def __init__(self, copy: HostCopy) -> None:
        self._copy = copy
        self._expected: deque[Record] = deque()

    def expect(self, records: Sequence[Record]) -> None:
        self._expected.extend(records)

    def take(self, wait: bool = True) -> Tensor | None:
        return self._copy.view(self._expected.popleft())

    def give(self, done: Mark | None) -> None:
        """Nothing to do: the record stays where it is."""

    def close(self) -> None:
        """Nothing to do: the copy belongs to whoever loaded it."""


class ReadAhead:
    """Records that a thread reads into `buffers` ahead of their use: host memory is bounded by the buffers.

    Args:
        read: puts a record in a buffer.
        buffers: uint8 on the CPU, each large enough for any record.
    """

    def __init__(self, read: Callable[[Record, Tensor], None], buffers: Sequence[Tensor]) -> None:
        self._read = read
        self._expected: deque[Record] = deque()
        self._free: deque[tuple[Tensor, Mark | None]] = deque((buffer, None) for buffer in buffers)
        self._filled: deque[Tensor] = deque()
        self._out: deque[Tensor] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="read-ahead", daemon=True)
        self._thread.start()

    def expect(self, records: Sequence[Record]) -> None:
        with self._changed:
            self._expected.extend(records)
            self._changed.notify_all()

    def take(self, wait: bool = True) -> Tensor | None:
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._filled or self._error)
            if self._error is not None:
                raise self._error
            if not self._filled:
                return None
            self._out.append(self._filled.popleft())
            return self._out[-1]

    def give(self, done: Mark | None) -> None:
        with self._changed:
            self._free.append((self._out.popleft(), done))
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for buffers in (self._free, self._filled, self._out):
            buffers.clear()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._expected and self._free))
                if self._closed:
                    return
                record = self._expected.popleft()
                buffer, free = self._free.popleft()
            try:
                if free is not None:
                    free.synchronize()
                self._read(record, buffer)
            # Whatever it is, it is the taker's error: this thread has nobody to tell.
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._filled.append(buffer)
                self._changed.notify_all()


class Slots:
    """Records brought to a device in a few fixed buffers: each copy starts as soon as a slot is free and its record is
    there, beside compute, so with two slots or more the next records come while one is computed with.

    Args:
        source: where the records come from.
        size: bytes of a slot.
        count: slots; with one, copy and compute take turns.
        device: where the slots lie; on a CPU they are plain memory and copies happen at once.
        stream: the copies' stream.
    """

    def __init__(self, source: Feed, size: int, count: int, device: torch.device, stream: CopyStream) -> None:
        self._source = source
        self._stream = stream
        self._expected = 0
        # The memory may have been another tensor's until now.
        free = stream.mark()
        slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        hold("slots", slots)
        self._free: deque[tuple[Tensor, Mark | None]] = deque((slot, free) for slot in slots)
        self._loaded: deque[tuple[Tensor, Mark | None]] = deque()
        self._out: deque[Tensor] = deque()

    def expect(self, records: Sequence[Record]) -> None:
        self._source.expect(records)
        self._expected += len(records)
        self._load(wait=False)

    def take(self, wait: bool = True) -> Tensor | None:
        self._load(wait=wait and not self._loaded)
        if not self._loaded:
            return None
        slot, ready = self._loaded.popleft()
        self._stream.wait(ready)
        self._out.append(slot)
        return slot

    def give(self, done: Mark | None) -> None:
        self._free.append((self._out.popleft(), done))
        self._load(wait=False)

    def close(self) -> None:
        # The allocator does not know of the copies under way to the memory that it is about to get back.
        self._stream.synchronize()
        self._source.close()
        for slots in (self._free, self._loaded, self._out):
            slots.clear()

    def _load(self, wait: bool) -> None:
        """Enqueues the copies that can start; with `wait` at least one."""
        while self._expected and self._free:
            record = self._source.take(wait)
            if record is None:
                return
            wait = False
            slot, free = self._free.popleft()
            ready = self._stream.copy(slot, record, free)
            self._source.give(ready)
            self._expected -= 1
            self._loaded.append((slot, ready))
