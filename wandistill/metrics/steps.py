"""A rank's steps as samples: histograms of their parts, the last figures, the pace."""

from __future__ import annotations

import bisect
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping

from wandistill.metrics.names import BUCKETS, EXPERTS, PARTS
from wandistill.metrics.snapshot import Sample

_MEDIAN_OF = 101


def wall_time(moment: float) -> float:
    """When `moment` of the monotonic clock was, by the wall clock as it is now: that may have been set meanwhile."""
    return time.time() - (time.monotonic() - moment)


class StepStatistics:
    """Adds up what a rank's steps told.

    Args:
        total: steps of the whole run.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._step = 0
        self._last: Mapping[str, float] = {}
        self._expert = ""
        self._samples = 0.0
        self._nonfinite = 0
        self._counts = {part: [0] * (len(BUCKETS) + 1) for part in PARTS}
        self._sums = dict.fromkeys(PARTS, 0.0)
        self._intervals: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._ended = time.monotonic()

    def begin(self, step: int) -> None:
        """Training begins after `step` steps."""
        self._step = step
        self._ended = time.monotonic()

    def add(self, step: int, figures: Mapping[str, float], expert: str) -> None:
        """Step `step` (from 1) ended.

        Args:
            figures: loss, lr, grad_norm, samples (the rank's share), and PART_seconds of `PARTS`.
            expert: the teacher's expert that was asked, of `EXPERTS`.
        """
        before, self._ended = self._ended, time.monotonic()
        self._intervals.append(self._ended - before)
        self._step, self._last, self._expert = step, figures, expert
        self._samples += figures["samples"]
        self._nonfinite += not math.isfinite(figures["grad_norm"])
        for part in PARTS:
            seconds = figures[f"{part}_seconds"]
            self._counts[part][bisect.bisect_left(BUCKETS, seconds)] += 1
            self._sums[part] += seconds

    def resume(self) -> None:
        """A pause between two steps is over: it counts for no step's pace."""
        self._ended = time.monotonic()

    def add_nonfinite(self) -> None:
        """A step's target or loss was not finite."""
        self._nonfinite += 1

    @property
    def median(self) -> float | None:
        """Seconds from one step's end to the next."""
        return statistics.median(self._intervals) if self._intervals else None

    def samples(self) -> dict[str, list[Sample]]:
        """The samples of the rank."""
        found: dict[str, list[Sample]] = {
            "wandistill_step": [({}, self._step)],
            "wandistill_rank_last_step_timestamp_seconds": [({}, round(wall_time(self._ended), 3))],
            "wandistill_samples_total": [({}, self._samples)],
            "wandistill_rank_nonfinite_total": [({}, self._nonfinite)],
            "wandistill_step_seconds": [
                ({"part": part}, {"counts": list(self._counts[part]), "sum": self._sums[part]}) for part in PARTS
            ],
        }
        if self._last:
            found["wandistill_loss"] = [({}, self._last["loss"])]
            found["wandistill_learning_rate"] = [({}, self._last["lr"])]
            found["wandistill_gradient_norm"] = [({}, self._last["grad_norm"])]
            found["wandistill_rank_step_median_seconds"] = [({}, self.median)]
        if self._expert:
            found["wandistill_rank_expert"] = [({"expert": name}, int(name == self._expert)) for name in EXPERTS]
        return found

    def run_samples(self) -> dict[str, list[Sample]]:
        """The samples of the run, which one rank tells."""
        found: dict[str, list[Sample]] = {"wandistill_progress_ratio": [({}, self._step / max(self._total, 1))]}
        if self.median is not None:
            end = wall_time(self._ended) + self.median * (self._total - self._step)
            found["wandistill_predicted_end_timestamp_seconds"] = [({}, round(end))]
        return found
