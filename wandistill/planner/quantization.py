"""Memory of the comparison with bfloat16 that a run with 8-bit storage makes before it builds its student.

`wandistill.train.run` puts a second teacher beside the placed one, in bfloat16 and read from disk, and asks both for
the targets of the same batches.
"""

from __future__ import annotations

from wandistill.device_map import BYTES_PER_ELEMENT, DeviceMap
from wandistill.planner.placements import Placement
from wandistill.planner.request import PlanRequest
from wandistill.planner.teacher_memory import DISK_BLOCKS, forward_terms, records, weight_terms
from wandistill.planner.terms import Term, total
from wandistill.units import format_bytes

# Batches that are compared; all are asked for before the first is answered.
BATCHES = 8


def compares(request: PlanRequest) -> bool:
    """Whether the run measures what 8-bit storage does to its targets."""
    return request.trains and BYTES_PER_ELEMENT[request.teacher_dtype] == 1


def comparing(
    request: PlanRequest, placement: Placement, rank: int, places: DeviceMap | None, batch: Term
) -> list[Term]:
    """What comes and goes on the device of `rank`, the placed teacher's weights not counted.

    Args:
        batch: one batch's inputs.
    """
    reference = _reference(request)
    asks = (request.teacher_rows, BATCHES)
    ours = forward_terms(request, placement, rank, places, *asks)
    theirs = forward_terms(reference, Placement.DISK, rank, None, *asks)
    weights = weight_terms(reference, Placement.DISK, rank, None)
    return [
        Term("reference slots", total(weights), "a bfloat16 teacher from disk"),
        *max(ours, theirs, key=total),
        Term("probe batches", BATCHES * batch.size, f"{BATCHES} x {format_bytes(batch.size)}"),
    ]


def comparing_on_node(request: PlanRequest, placement: Placement) -> list[Term]:
    """What the second teacher takes of a node's own memory."""
    reference, ranks = _reference(request), request.machines.ranks
    own = records(reference, Placement.DISK)
    # Without a rank that only serves them, the ranks that train share no memory: each reads for itself.
    copies = ranks if placement is Placement.GPU0 else 1
    outer = copies * request.model.experts * own.outer
    buffer = request.disk_buffer or DISK_BLOCKS * own.block
    return [
        Term("reference copy", outer, f"{copies} x what lies outside its blocks"),
        Term("reference buffers", ranks * buffer, f"{ranks} ranks x {format_bytes(buffer)}"),
    ]


def _reference(request: PlanRequest) -> PlanRequest:
    return request.change(teacher_dtype="bfloat16")
