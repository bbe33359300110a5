"""The order between copies and compute: a stream for copies on a GPU, and plain order on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in a device's work. None stands for a point that has passed."""

    def synchronize(self) -> None:
        """Waits on the host until the point has passed."""
        ...


class Copied:
    """Counts the bytes that all copy streams of this process copied."""

    size = 0


class CopyStream:
    """Copies to `device` that run beside its compute.

    On a GPU events order the two, and the host never waits. On a CPU copies happen at once, so every mark is None:
    the callers' code is the same.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device

    def mark(self) -> Mark | None:
        """The point after all compute enqueued so far."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def copy(self, target: Tensor, source: Tensor, after: Mark | None) -> Mark | None:
        """Copies once `after` has passed; returns the point after the copy.

        Both tensors must outlive that point: torch's allocator does not know of it.
        """
        Copied.size += source.nbytes
        return self.run(lambda: target.copy_(source, non_blocking=True), after)

    def run(self, work: Callable[[], object], after: Mark | None) -> Mark | None:
        """Does `work`, which enqueues on the current stream, once `after` has passed; returns the point after it."""
        if self._stream is None:
            work()
            return None
        with torch.cuda.stream(self._stream):
            if isinstance(after, torch.cuda.Event):
                self._stream.wait_event(after)
            work()
            return self._stream.record_event()

    def wait(self, mark: Mark | None) -> None:
        """Makes all compute enqueued from now on wait for `mark`."""
        if isinstance(mark, torch.cuda.Event):
            torch.cuda.current_stream(self._device).wait_event(mark)

    def synchronize(self) -> None:
        """Waits on the host until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()
