"""Seconds of the parts of a step, without making the host wait for the GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepTimer:
    """Adds up the seconds of named parts of one step.

    On a GPU the parts are events on its stream; `seconds` waits for them, so it is called a step later.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[str, object, object]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times the body as part of `name`."""
        begin = self._mark()
        yield
        self._spans.append((name, begin, self._mark()))

    def seconds(self) -> dict[str, float]:
        """Seconds per name."""
        totals: dict[str, float] = {}
        for name, begin, end in self._spans:
            if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                end.synchronize()
                duration = begin.elapsed_time(end) / 1000
            else:
                assert isinstance(begin, float) and isinstance(end, float)
                duration = end - begin
            totals[name] = totals.get(name, 0.0) + duration
        return totals

    def _mark(self) -> object:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
