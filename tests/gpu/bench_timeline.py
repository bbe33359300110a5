"""What a GPU does during two steps: how much of the time its links and its cores work, and how long nothing does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]


def timeline(steps: Callable[[], object]) -> dict[str, Any]:
    """Shares of the time between the first and the last work on this process's GPU.

    A copy on the GPU itself counts as compute; NCCL's kernels are apart, since they only wait and move.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        steps()
        torch.cuda.synchronize()
    kinds: dict[str, list[Span]] = {"link": [], "nccl": [], "compute": []}
    for event in recorded.events():
        if event.device_type == DeviceType.CUDA:
            kinds[_kind(event.name)].append((event.time_range.start, event.time_range.end))
    everything = [span for spans in kinds.values() for span in spans]
    begin, end = min(span[0] for span in everything), max(span[1] for span in everything)
    shares = {f"{kind}_busy": _length(spans) / (end - begin) for kind, spans in kinds.items()}
    idle = _gaps(everything)
    found = {**shares, "idle": sum(idle) / (end - begin)}
    return {
        "seconds": round((end - begin) / 1e6, 6),
        **{name: round(share, 4) for name, share in found.items()},
        "longest_gap_seconds": round(max(idle, default=0.0) / 1e6, 6),
    }


def _kind(name: str) -> str:
    if name.startswith("Memcpy") and "DtoD" not in name:
        return "link"
    return "nccl" if name.startswith("nccl") else "compute"


def _length(spans: Iterable[Span]) -> float:
    """Length of the union of spans."""
    return sum(end - begin for begin, end in _joined(spans))


def _gaps(spans: Iterable[Span]) -> list[float]:
    """Lengths of what lies between the joined spans."""
    joined = _joined(spans)
    return [after[0] - before[1] for before, after in pairwise(joined)]


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, those that touch as one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found
