"""What a run does with its plan: the placement that it takes, why, and the refusal where it cannot fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wandistill.errors import DoesNotFit
from wandistill.planner.advice import Advice, Change, advise
from wandistill.planner.placements import AUTO, SPECS, Placement
from wandistill.planner.plan import Plan, Row, plan
from wandistill.planner.rates import Rates
from wandistill.planner.report import row_json
from wandistill.planner.request import PlanRequest
from wandistill.units import format_bytes, format_seconds

_MOST_ADVICE = 4


@dataclass(frozen=True)
class Decision:
    """The placement of a run."""

    plan: Plan
    row: Row  # what the plan says of the placement
    strategy: str  # the placement
    forced: str = ""  # why it should not have been taken

    @property
    def settings(self) -> dict[str, str]:
        """Flags that the plan relies on, by name."""
        return self.row.settings

    def to_json(self) -> dict[str, Any]:
        """As run.json holds it: the placement with all its terms, and of the others whether they fit."""
        others = [row for row in self.plan.rows if row is not self.row]
        return {
            "placement": self.strategy,
            "why": self.plan.why,
            "forced": self.forced,
            "margin": self.plan.request.memory_margin,
            **{name: value for name, value in row_json(self.row).items() if name != "placement"},
            "others": [
                {"placement": row.placement.value, "fits": row.within_margin, "reason": row.reason} for row in others
            ],
        }


def decide(request: PlanRequest, rates: Rates | None = None, *, force: bool = False) -> Decision:
    """Takes the placement that was asked for, or with `auto` the fastest that leaves the margin free.

    Args:
        rates: as measured; else the catalogue's.
        force: go on although it does not fit: with `auto` with the placement that lacks least.

    Raises:
        DoesNotFit: with the planner's sentence and what would make it fit.
        ConfigError: the request names a placement that does not exist.
    """
    strategy = request.placement
    if strategy not in (AUTO, Placement.CUSTOM.value):
        # With too few ranks to share it each holds the whole teacher, as gpu does.
        spec, machines = SPECS[Placement(strategy)], request.machines
        if spec.min_ranks > (machines.world if spec.whole_job else machines.ranks):
            request = request.change(placement=Placement.GPU.value)
    answer = plan(request, rates)
    if answer.choice is not None:
        taken = strategy if strategy != AUTO else answer.choice.placement.value
        return Decision(answer, answer.choice, taken)
    if not force:
        raise DoesNotFit(refusal(answer))
    row = _nearest(answer)
    return Decision(answer, row, strategy if strategy != AUTO else row.placement.value, forced=answer.why)


def refusal(answer: Plan) -> str:
    """Why nothing was chosen, and what would make it fit, in a paragraph."""
    asked = answer.request.placement
    text = f"--teacher_device_strategy {asked}: {answer.why}"
    if asked == AUTO:
        row = _nearest(answer)
        text += f"; the nearest is {row.placement.value}: {row.lack or row.reason}" if row.lack else ""
    advice = advise(answer)[:_MOST_ADVICE]
    would = "; or ".join(map(_told, advice))
    return (
        f"{text}. "
        + (f"It would fit with {would}. " if would else "Nothing that was tried makes it fit. ")
        + "--force starts it all the same."
    )


def paragraph(decision: Decision) -> str:
    """What a run prints about its placement."""
    row, request = decision.row, decision.plan.request
    machines = request.machines
    settings = "".join(f" --{name} {value}" for name, value in decision.settings.items())
    reason = decision.plan.why
    if decision.forced:
        reason = f"started all the same, since --force was given: {decision.forced}"
    text = f"teacher: {decision.strategy}{settings} ({reason})"
    if row.node is not None:
        where = f"{format_bytes(row.peak)} of {format_bytes(machines.device_memory)} on each GPU at most, "
        text += f". Predicted: {where if request.on_gpu else ''}{format_bytes(row.node.host.peak)} of "
        text += f"{format_bytes(machines.host_memory)} on each node"
        if row.time is not None and request.trains:
            text += f", {format_seconds(row.time.step)} a step"
    faster = _faster_ones(decision)
    if request.placement == AUTO and faster:
        text += f". Not {'; not '.join(faster)}"
    return f"{text}."


def _faster_ones(decision: Decision) -> list[str]:
    """The placements that would be faster, with the reason against each."""
    own = decision.row.time
    if own is None:
        return []
    return [
        f"{row.placement.value}: {row.reason or 'it leaves less than the margin free'}"
        for row in decision.plan.rows
        if row.time and not row.within_margin and row.time.samples_per_second > own.samples_per_second
    ][:2]


def _told(advice: Advice) -> str:
    names_it = any(change.kind == "--teacher_device_strategy" for change in advice.changes)
    then = "" if names_it else f" (then {advice.row.placement.value} fits)"
    machines = [change.why for change in advice.changes if change.machines]
    flags = " ".join(_flags(change) for change in advice.changes if not change.machines)
    return " and ".join(part for part in (*machines, flags) if part) + then


def _flags(change: Change) -> str:
    """A change as a flag of `wandistill train`."""
    return change.flags.replace("--student ", "--student_config ")


def _nearest(answer: Plan) -> Row:
    """The placement that was asked for, or the one that lacks least."""
    if answer.request.placement != AUTO:
        return answer.row(Placement(answer.request.placement))
    rows = [row for row in answer.rows if row.ranks] or list(answer.rows)
    return min(rows, key=lambda row: (not row.fits, row.lack.missing if row.lack else 0))
