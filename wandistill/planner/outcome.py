"""A plan and what a run then measured, side by side, as run.json and the report show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wandistill.planner.decide import Decision
from wandistill.planner.placements import SPECS
from wandistill.planner.terms import Phases, total

# The phases that fill the caches are measured as one.
CACHES = "caches"


class HostUse(NamedTuple):
    """Bytes of host memory of a process; mapped files, which the kernel gives up, are left out."""

    private: int  # its own
    shared: int  # also other ranks', such as the teacher's host copy

    @property
    def total(self) -> int:
        """Both."""
        return self.private + self.shared


@dataclass(frozen=True)
class RankUse:
    """Peaks of one rank in bytes; 0 without a GPU."""

    rank: int  # of the job
    node: int
    gpu_allocated: int  # torch.cuda.max_memory_allocated
    gpu_process: int  # of all that the process holds on the card: context, libraries, torch's reserve
    host: Mapping[str, HostUse]  # in each phase, when both together were the most
    phases: Mapping[str, int] = field(default_factory=dict)  # allocated in each; only with --memory_profile
    terms: Mapping[str, int] = field(default_factory=dict)  # held at the end; only with --memory_profile


def side_by_side(decision: Decision, uses: Sequence[RankUse], step_seconds: float | None) -> dict[str, Any]:
    """Predicted and measured peaks of every rank and node, and seconds of a step.

    Args:
        uses: of the ranks.
        step_seconds: the median step, None before there are any.
    """
    row = decision.row
    gpus = []
    for use in uses:
        planned = planned_rank(decision, use.rank)
        if use.gpu_process:
            gpus.append(
                {
                    "rank": use.rank,
                    "predicted_allocated_bytes": planned.peak_allocated if planned else None,
                    "measured_allocated_bytes": use.gpu_allocated,
                    "predicted_process_bytes": planned.peak if planned else None,
                    "measured_process_bytes": use.gpu_process,
                }
            )
    nodes = {number: [use for use in uses if use.node == number] for number in sorted({use.node for use in uses})}
    host = [
        {
            "node": number,
            "predicted_bytes": row.node.host.peak if row.node else None,
            "measured_bytes": _most_on_host(node),
        }
        for number, node in nodes.items()
    ]
    return {
        "placement": decision.strategy,
        "gpu": gpus,
        "host": host,
        "step_seconds": {"predicted": row.time.step if row.time else None, "measured": step_seconds},
    }


def _most_on_host(node: Sequence[RankUse]) -> int:
    """Of all phases the most that a node's ranks had together: one has its peak while it builds the student, which
    the others wait for, and they have theirs later."""

    def together(phase: str) -> int:
        uses = [use.host[phase] for use in node if phase in use.host]
        return sum(use.private for use in uses) + max(use.shared for use in uses)

    return max((together(phase) for phase in {phase for use in node for phase in use.host}), default=0)


def profile(decision: Decision, uses: Sequence[RankUse]) -> dict[str, Any]:
    """memory_profile.json: of each rank the peak of every phase and what every term holds, predicted and measured.

    A figure that could not be measured, such as an allocation peak on a CPU, is null.
    """
    ranks = []
    for use in uses:
        planned = planned_rank(decision, use.rank)
        if planned is None:
            continue
        peaks: dict[str, int] = {}
        for name, terms in planned.phases.items():
            measured_as = CACHES if name in ("embeddings", "rollouts") else name
            peak = total(term for term in terms if term.allocated)
            peaks[measured_as] = max(peaks.get(measured_as, 0), peak)
        phases = [
            {"phase": name, "predicted_bytes": size, "measured_bytes": use.phases.get(name)}
            for name, size in peaks.items()
        ]
        sizes: dict[str, int] = {}
        for terms in planned.phases.values():
            for term in terms:
                sizes[term.name] = max(sizes.get(term.name, 0), term.size)
        terms_json = [
            {"term": name, "predicted_bytes": size, "measured_bytes": use.terms.get(name)}
            for name, size in sorted(sizes.items(), key=lambda item: -item[1])
            if size or use.terms.get(name)
        ]
        ranks.append({"rank": use.rank, "phases": phases, "terms": terms_json})
    return {"schema": 1, "placement": decision.strategy, "ranks": ranks}


def planned_rank(decision: Decision, rank: int) -> Phases | None:
    """What the plan says of a rank's device; None where a run was forced past a plan without figures."""
    planned = decision.row.ranks
    if not planned:
        return None
    whole_job = SPECS[decision.row.placement].whole_job
    return planned[rank if whole_job else rank % decision.plan.request.machines.ranks]
