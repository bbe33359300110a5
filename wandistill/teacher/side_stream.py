"""The teacher's compute beside the student's: a stream of its own on a GPU, plain order on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """Work that is enqueued now and may run while the student computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self, inputs: Iterable[Tensor] = ()) -> Iterator[None]:
        """Enqueues what is done inside on the side stream, after all that the current stream has now.

        Args:
            inputs: tensors of the current stream that are used inside; the caller may drop them at once.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        for tensor in inputs:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """The point after all side work enqueued so far."""
        return None if self._stream is None else self._stream.record_event()

    def hand_over(self, tensors: Iterable[Tensor], mark: torch.cuda.Event | None) -> None:
        """Lets the current stream use `tensors` of the side stream, once it has passed `mark`."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream()
        if mark is not None:
            current.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(current)
