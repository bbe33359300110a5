"""A plan and what a run then measured, side by side, as run.json and the report show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wandistill.planner.decide import Decision
from wandistill.planner.placements import SPECS
from wandistill.planner.terms import Phases, total

# The phases that fill the caches are measured as one.
CACHES = "caches"


@dataclass(frozen=True)
class RankUse:
    """Peaks of one rank in bytes; 0 without a GPU."""

    rank: int  # of the job
    node: int
    gpu_allocated: int  # torch.cuda.max_memory_allocated
    gpu_process: int  # of all that the process holds on the card: context, libraries, torch's reserve
    host_private: int  # when it had the most, its part in what is shared counted
    host_shared: int  # with the node's other ranks, at that time
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
            "measured_bytes": sum(use.host_private for use in node) + max(use.host_shared for use in node),
        }
        for number, node in nodes.items()
    ]
    return {
        "placement": decision.strategy,
        "gpu": gpus,
        "host": host,
        "step_seconds": {"predicted": row.time.step if row.time else None, "measured": step_seconds},
    }


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
