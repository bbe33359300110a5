"""Inverse questions: the most that fits, the least that is enough. Each is a search over whole plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wandistill.errors import ConfigError
from wandistill.planner.plan import Plan, plan
from wandistill.planner.request import PlanRequest
from wandistill.units import GIB, MIB, format_bytes

MAXIMA = ("batch_size", "resolution")
MINIMA = ("gpus", "gpu_memory")

_MOST_BATCH = 4096
_MOST_GPUS = 64
_MOST_SIDE = 8192
_MEMORY_STEP = 256 * MIB
_MOST_MEMORY = 1024 * GIB


@dataclass(frozen=True)
class Found:
    """The answer to an inverse question."""

    question: str
    value: str | None  # None: no value is enough
    plan: Plan | None

    def to_json(self) -> dict[str, object]:
        """As JSON."""
        choice = self.plan.choice.placement.value if self.plan and self.plan.choice else None
        return {"question": self.question, "value": self.value, "choice": choice}


def largest(request: PlanRequest, what: str) -> Found:
    """The largest batch size or resolution with which a placement fits.

    Raises:
        ConfigError: `what` is not one of `MAXIMA`.
    """
    if what == "batch_size":
        found = _last(1, _MOST_BATCH, lambda value: _fitting(request.change(batch_size=value)))
        return Found("max batch_size", None if found is None else str(found[0]), found and found[1])
    if what == "resolution":
        step = request.model.resolution_step
        long, short = max(request.width, request.height), min(request.width, request.height)

        def sized(units: int) -> tuple[int, int]:
            """Width and height with `units` steps on the longer side, in the asked shape."""
            other = max(1, round(units * short / long)) * step
            return (units * step, other) if request.width >= request.height else (other, units * step)

        def fitting(units: int) -> Plan | None:
            width, height = sized(units)
            return _fitting(request.change(width=width, height=height))

        found = _last(1, _MOST_SIDE // step, fitting)
        if found is None:
            return Found("max resolution", None, None)
        width, height = sized(found[0])
        return Found("max resolution", f"{width}x{height}", found[1])
    raise ConfigError(f"--max {what}: must be one of {', '.join(MAXIMA)}.")


def smallest(request: PlanRequest, what: str) -> Found:
    """The fewest GPUs of a node, or the least memory of each, with which a placement fits.

    Raises:
        ConfigError: `what` is not one of `MINIMA`, or there is no GPU in the question.
    """
    if what not in MINIMA:
        raise ConfigError(f"--min {what}: must be one of {', '.join(MINIMA)}.")
    if not request.on_gpu:
        raise ConfigError(f"--min {what}: the question has no GPU; give --gpu and --gpus.")
    if what == "gpus":
        # Host memory grows with the ranks, so more are not always enough: each number is tried.
        for count in range(1, _MOST_GPUS + 1):
            fitting = _fitting(request.change_machines(ranks=count))
            if fitting is not None:
                return Found("min gpus", str(count), fitting)
        return Found("min gpus", None, None)
    steps = _MOST_MEMORY // _MEMORY_STEP
    found = _last(
        0, steps - 1, lambda less: _fitting(request.change_machines(gpu_memory=(steps - less) * _MEMORY_STEP))
    )
    if found is None:
        return Found("min gpu_memory", None, None)
    return Found("min gpu_memory", format_bytes((steps - found[0]) * _MEMORY_STEP), found[1])


def _fitting(request: PlanRequest) -> Plan | None:
    answer = plan(request)
    return answer if answer.choice is not None else None


def _last(low: int, high: int, fitting: Callable[[int], Plan | None]) -> tuple[int, Plan] | None:
    """The last value from `low` to `high` that fits, where all before it do too."""
    best = fitting(low)
    if best is None:
        return None
    step, value = 1, low
    while value < high:
        trial = min(value + step, high)
        found = fitting(trial)
        if found is None:
            high = trial - 1
            break
        value, best, step = trial, found, 2 * step
    while value < high:
        middle = (value + high + 1) // 2
        found = fitting(middle)
        if found is None:
            high = middle - 1
        else:
            value, best = middle, found
    return value, best
