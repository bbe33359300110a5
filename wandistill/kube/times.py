"""Seconds in the chart's tables, on each GPU: the teacher's part of a step under a placement, and the rest of it.

Where the students train in a part of the teacher's seconds, its own part follows them after a slash.
"""

from __future__ import annotations

from collections.abc import Sequence

from wandistill.catalog import Gpu
from wandistill.kube.sizing import one_node
from wandistill.planner.placements import Placement
from wandistill.planner.plan import Row
from wandistill.planner.request import PlanRequest
from wandistill.planner.timing import step_time

# Nodes of a job, by what stands behind the ranks of one in a key: more than two are as eight.
NODES = {"": 1, "+": 2, "++": 8}


def teacher_times(
    request: PlanRequest,
    placement: Placement,
    rows: Sequence[Row | None],
    cards: Sequence[Gpu | None],
    *,
    serves_only: bool = False,
) -> str:
    """The teacher's part of a step.

    Args:
        rows: of the placement, one for each GPU; None where it is not.
    """
    seconds = []
    for row, card in zip(rows, cards, strict=True):
        if row is None or row.node is None:
            seconds.append("-")
            continue
        asked = row.settled(request).change_machines(gpu=card)
        time = step_time(asked, placement, row.places, serves_only=serves_only)
        seconds.append("/".join(dict.fromkeys(_part(own) for own in (time.teacher, time.busy))))
    return " ".join(seconds)


def answer_times(request: PlanRequest, cards: Sequence[Gpu | None]) -> str:
    """The answer to one rank for a step, by a teacher that has a GPU of its own."""
    runs = [request.change(machines=one_node(card, 1)) for card in cards]
    return " ".join(_part(step_time(run, Placement.GPU, None, serves_only=False).teacher) for run in runs)


def train_times(request: PlanRequest, cards: Sequence[Gpu | None], nodes: int) -> str:
    """All of a step but the teacher's part, on so many nodes."""
    runs = [request.change_machines(gpu=card, nodes=nodes) for card in cards]
    return " ".join(_part(step_time(run, Placement.GPU, None, serves_only=False).train) for run in runs)


def _part(seconds: float) -> str:
    return f"{seconds:.3g}"


def step_text(seconds: float) -> str:
    """Seconds of a step as they are told: a plan is not more exact."""
    return f"{float(f'{seconds:.2g}'):g}"
