"""What is measured while teacher and student draw side by side: sums that give errors, distances and seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wandistill.teacher.base import Expert

# Eighths of t: the boundary of Wan2.2-A14B and of the embedded teacher, 0.875, is an edge of them.
T_BUCKETS = 8


@dataclass
class _Sums:
    squared_error: float = 0.0
    squared_target: float = 0.0
    values: int = 0
    states: int = 0

    def add(self, velocity: Tensor, target: Tensor) -> None:
        self.squared_error += (velocity.double() - target.double()).square().sum().item()
        self.squared_target += target.double().square().sum().item()
        self.values += target.numel()
        self.states += len(target)

    def figures(self) -> dict[str, Any]:
        return {
            "relative_l2": math.sqrt(self.squared_error / self.squared_target) if self.squared_target else math.nan,
            "mse": self.squared_error / self.values if self.values else math.nan,
            "target_mean_square": self.squared_target / self.values if self.values else math.nan,
            "states": self.states,
        }


class VelocityErrors:
    """The student's velocity against the teacher's guided one, over all states, by t and by expert.

    Args:
        boundary: the experts' boundary in t, or None.
    """

    def __init__(self, boundary: float | None) -> None:
        self._boundary = boundary
        self._all = _Sums()
        self._by_t: dict[tuple[int, Expert], _Sums] = {}
        self._by_expert: dict[Expert, _Sums] = {}

    def add(self, t: float, expert: Expert, velocity: Tensor, target: Tensor) -> None:
        """States [B, ...] at time `t`, whose target came from `expert`."""
        bucket = min(int(t * T_BUCKETS), T_BUCKETS - 1)
        for sums in (
            self._all,
            self._by_t.setdefault((bucket, expert), _Sums()),
            self._by_expert.setdefault(expert, _Sums()),
        ):
            sums.add(velocity, target)

    def figures(self) -> dict[str, Any]:
        """relative_l2 (error's L2 norm over the target's), mse, target_mean_square and states; the same `by_t`, in
        rising t, and `by_expert`."""
        by_t = [
            {**self._range(bucket, expert), "expert": expert.value, **sums.figures()}
            for (bucket, expert), sums in sorted(
                self._by_t.items(), key=lambda item: (item[0][0], item[0][1] is Expert.HIGH)
            )
        ]
        by_expert = {expert.value: sums.figures() for expert, sums in self._by_expert.items()}
        return {**self._all.figures(), "by_t": by_t, "by_expert": by_expert}

    def _range(self, bucket: int, expert: Expert) -> dict[str, float]:
        """A bucket's stretch of t, cut at the boundary where that lies inside it."""
        start, end = bucket / T_BUCKETS, (bucket + 1) / T_BUCKETS
        if self._boundary is not None:
            start, end = (
                (max(start, self._boundary), end) if expert is Expert.HIGH else (start, min(end, self._boundary))
            )
        return {"t_from": start, "t_to": end}


class Distance:
    """Root mean square difference of pairs of tensors, and, as a measure of what that means, of the teacher's
    results for neighbouring prompts, which have nothing to do with each other."""

    def __init__(self) -> None:
        self._paired, self._unrelated = _Sums(), _Sums()
        self._last: Tensor | None = None

    def add(self, teacher: Tensor, student: Tensor) -> None:
        """Results [B, ...] of the same prompts from the same noise."""
        self._paired.add(student, teacher)
        row = teacher if self._last is None else torch.cat([self._last, teacher])
        self._unrelated.add(row[1:], row[:-1])
        self._last = teacher[-1:]

    @property
    def paired(self) -> float:
        """Between teacher and student."""
        return math.sqrt(self._paired.figures()["mse"])

    @property
    def unrelated(self) -> float:
        """Between pictures of different prompts; nan with one prompt."""
        return math.sqrt(self._unrelated.figures()["mse"])


@dataclass
class Stopwatch:
    """Seconds per image of something done batch by batch."""

    device: torch.device
    laps: list[tuple[float, int]] = field(default_factory=list)

    @contextmanager
    def lap(self, images: int) -> Iterator[None]:
        """Times what happens inside, with all the device's work."""
        self._wait()
        began = time.perf_counter()
        yield
        self._wait()
        self.laps.append((time.perf_counter() - began, images))

    @property
    def seconds_per_image(self) -> float:
        """Over all batches but the first, which warms up, unless it is the only one."""
        laps = self.laps[1:] or self.laps
        return sum(seconds for seconds, _ in laps) / sum(images for _, images in laps)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def finite_or_none(value: Any) -> Any:
    """`value` with every number that is not finite, which JSON cannot hold, replaced by None."""
    if isinstance(value, dict):
        return {key: finite_or_none(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite_or_none(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
