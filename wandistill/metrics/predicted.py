"""What the plan says of a rank's GPU, as samples by the terms of the table."""

from __future__ import annotations

from collections import defaultdict

from wandistill.metrics.snapshot import Sample
from wandistill.planner.terms import Phases

# How the planner's terms begin, the longer before the shorter, and what they count as.
_GROUPS = {
    "teacher slots": "slots",
    "teacher wide block": "slots",
    "teacher activations": "activations",
    "teacher answers": "activations",
    "teacher features": "activations",
    "teacher inputs": "activations",
    "teacher": "teacher",
    "expert": "teacher",
    "student activations": "activations",
    "student gradients": "gradients",
    "fsdp gradient buffers": "gradients",
    "student moments": "optimizer",
    "student average": "average",
    "student": "student",
    "fsdp": "student",
    "autocast": "student",
    "optimizer": "optimizer",
    "ranks'": "activations",
    "batches": "activations",
    "text": "encoders",
    "vae": "encoders",
}


def term_of(name: str) -> str:
    """The table's term of a planner's term; what belongs to no part of the run is the runtime's."""
    for begin, term in _GROUPS.items():
        if name == begin or name.startswith(begin + " "):
            return term
    return "runtime"


def predicted_samples(planned: Phases) -> dict[str, list[Sample]]:
    """The terms at the plan's peak, which add up to it, and what torch is to have allocated at its own."""
    sums: dict[str, int] = defaultdict(int)
    for term in planned.terms:
        sums[term_of(term.name)] += term.size
    return {
        "wandistill_rank_gpu_memory_predicted_bytes": [({"term": term}, size) for term, size in sums.items()],
        "wandistill_rank_gpu_memory_predicted_peak_bytes": [({}, planned.peak_allocated)],
    }
