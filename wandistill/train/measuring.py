"""What the probes measure with: times, random numbers, and a way round a GPU that is full."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

# Random numbers that a tensor is filled with, again and again: drawing all would take longer than what is measured.
_DRAWN = 1 << 20

T = TypeVar("T")


def unless_full(measure: Callable[[], T]) -> T | None:
    """What `measure` gives, or None where the GPU has no memory for it: the plan will say so."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        return None


def forget(device: torch.device) -> None:
    """Gives back what was allocated, and its peak."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def best_seconds(function: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """The better of two measurements of `calls` calls in a row, in seconds a call."""
    _row_seconds(function, device, calls)
    return min(_row_seconds(function, device, calls) for _ in range(2))


def mean_seconds(function: Callable[[], object], device: torch.device, *, within: float) -> float:
    """Seconds a call, in a row of as many as take `within` seconds: as in a run, where one call follows another and the
    host is disturbed now and then."""
    _row_seconds(function, device, 1)
    once = _row_seconds(function, device, 1)
    return once if once >= within else _row_seconds(function, device, int(within / once))


def _row_seconds(function: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds a call of `calls` calls in a row, until the device is done."""
    began = time.perf_counter()
    for _ in range(calls):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / calls


def random_numbers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Small random numbers; zeros would let a GPU run faster than it does with weights."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.empty(shape, dtype=dtype, device=device)
    drawn, *others = values.view(-1).split(_DRAWN)
    drawn.uniform_(-0.1, 0.1, generator=generator)
    for other in others:
        other.copy_(drawn[: len(other)])
    return values
