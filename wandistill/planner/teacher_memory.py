"""What the frozen teacher takes on each rank's device under each placement: weights, slots, and its forward.

Follows `wandistill.teacher`: `assembly` (stream, offload, disk, cpu, and gpu where blocks are widened), `sharded`,
`stage` and `pipeline` (gpu0, balanced, sequential, custom), `resident` (gpu).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from wandistill import device_map
from wandistill.device_map import DeviceMap
from wandistill.planner.activations import Pass, block_peak, forward_peak, state_bytes
from wandistill.planner.placements import SPECS, Placement
from wandistill.planner.records import ShardBytes, TeacherBytes, shard_bytes, teacher_bytes
from wandistill.planner.request import PlanRequest
from wandistill.planner.terms import Term
from wandistill.units import format_bytes

# Blocks from host memory or disk in a pipeline's stage pass two slots; disk is read into four buffers a rank.
STAGE_SLOTS = 2
DISK_BLOCKS = 4
# Exchanges between stages whose tensors are kept (wandistill.teacher.transport).
EXCHANGES = 2
# On a CPU a copy is done at once, so that stream needs but two slots.
_CPU_STREAM_SLOTS = 2


def records(request: PlanRequest, placement: Placement) -> TeacherBytes:
    """The bytes of one expert as `placement` keeps it."""
    return teacher_bytes(request.model.architecture, request.teacher_dtype, compute_bytes(request, placement))


def compute_bytes(request: PlanRequest, placement: Placement) -> int:
    """Bytes of an element in the teacher's compute (see `wandistill.teacher.layout.Precision`): a CPU takes float32
    for a half dtype that it has no kernels for, which float16 always is; 8-bit weights are computed in bfloat16."""
    on_cpu = not request.on_gpu or placement is Placement.CPU
    widened = on_cpu and (not request.machines.half_cores or request.teacher_dtype == "float16")
    return 4 if widened or request.teacher_dtype == "float32" else 2


def shares(request: PlanRequest) -> ShardBytes:
    """How `sharded` shares the teacher out."""
    model = request.model
    compute = compute_bytes(request, Placement.SHARDED)
    return shard_bytes(model.architecture, request.teacher_dtype, compute, request.machines.ranks, model.experts)


def spread(request: PlanRequest, placement: Placement, room: int | None) -> DeviceMap:
    """Which rank holds which unit.

    Args:
        room: most teacher bytes on a rank, for sequential and where `--max_memory` is given.

    Raises:
        DoesNotFit: the ranks have too little room together.
    """
    units = tuple(request.model.experts * size for size in records(request, placement).units)
    if placement is Placement.CUSTOM:
        assert request.device_map is not None
        return request.device_map
    if placement is Placement.GPU0:
        return (device_map.Place(request.teacher_rank),) * len(units)
    limit, ranks = request.max_memory, request.machines.ranks
    if placement is Placement.BALANCED:
        return _balanced(units, limit, ranks)
    return device_map.sequential(units, [room if limit is None else limit] * ranks)


@lru_cache(maxsize=256)
def _balanced(units: tuple[int, ...], limit: int | None, ranks: int) -> DeviceMap:
    return device_map.balanced(units, [limit] * ranks)


def weight_terms(request: PlanRequest, placement: Placement, rank: int, places: DeviceMap | None) -> list[Term]:
    """What of the teacher is on the device of `rank` from loading on: weights, slots, a block as it is computed with.

    Args:
        places: of a pipeline, from `spread`.
    """
    own, experts = records(request, placement), request.model.experts
    many = f"{experts} experts x " if experts > 1 else ""
    dtype = request.teacher_dtype
    apart = f", of which float32 {format_bytes(experts * own.float32)}" if dtype != "float32" else ""
    wide = Term("teacher wide block", own.wide, f"one block as computed with, {format_bytes(own.wide)}")
    outer_slot = Term("teacher slots", own.outer, f"one for what lies outside the blocks, {format_bytes(own.outer)}")
    if placement is Placement.CPU:
        return []
    if placement is Placement.GPU:
        if own.wide:
            blocks = experts * own.layers * own.block
            formula = f"{many}{own.layers} blocks x {format_bytes(own.block)} in {dtype}"
            return [Term("teacher weights", blocks, formula), outer_slot, wide]
        return [Term("teacher weights", experts * own.total, f"{many}{format_bytes(own.total)} in {dtype}{apart}")]
    if placement is Placement.SHARDED:
        return _shard_terms(request, rank, own, wide)
    if places is not None:
        return _stage_terms(request, rank, places, own, wide)
    slots = SPECS[placement].slots
    if placement is Placement.STREAM and not request.on_gpu:
        slots = _CPU_STREAM_SLOTS
    if placement is Placement.DISK and not request.on_gpu:
        return [wide]
    size = slots * own.block + own.outer
    formula = f"{slots} x {format_bytes(own.block)} + outside the blocks {format_bytes(own.outer)}"
    resident = (request.resident_blocks or 0) if placement is Placement.STREAM else 0
    kept = experts * resident * own.block
    return [
        Term("teacher weights", kept, f"{many}{resident} resident blocks x {format_bytes(own.block)}"),
        Term("teacher slots", size, formula),
        wide,
    ]


def _shard_terms(request: PlanRequest, rank: int, own: TeacherBytes, wide: Term) -> list[Term]:
    shard = shares(request)
    gpu = request.machines.gpu
    # Memory that peers read is not torch's allocator's; without peer access it is.
    allocated = gpu is None or gpu.peer_kind == "host"
    slots = SPECS[Placement.SHARDED].slots
    total = request.model.experts * own.total
    formula = f"{format_bytes(total)} / {request.machines.ranks} ranks by whole parameters"
    padding = shard.memory - shard.own[rank]
    size = slots * shard.slot + shard.outer
    return [
        Term("teacher weights", shard.own[rank], formula, allocated),
        Term("teacher padding", padding, f"to the largest part, {format_bytes(shard.memory)}", allocated),
        Term(
            "teacher slots",
            size,
            f"{slots} x others' parts {format_bytes(shard.slot)} + outside the blocks {format_bytes(shard.outer)}",
        ),
        wide,
    ]


def _stage_terms(request: PlanRequest, rank: int, places: DeviceMap, own: TeacherBytes, wide: Term) -> list[Term]:
    experts = request.model.experts
    units = own.units
    held = sum(units[index] for index, place in enumerate(places) if place == device_map.Place(rank))
    blocks = sum(
        1 for index, place in enumerate(places) if place == device_map.Place(rank) and 0 < index < len(units) - 1
    )
    fed = {place.store for place in places if place.rank == rank and place.store != "device"}
    terms = [
        Term("teacher weights", experts * held, f"{experts} x {blocks} of {own.layers} blocks and parts outside them"),
        Term(
            "teacher slots",
            len(fed) * STAGE_SLOTS * own.block,
            f"{len(fed)} x {STAGE_SLOTS} x {format_bytes(own.block)}",
        ),
    ]
    return [*terms, wide] if any(place.rank == rank for place in places) else []


def stored_terms(request: PlanRequest, placement: Placement, places: DeviceMap | None) -> list[Term]:
    """What a node keeps in its own memory of units that a device map puts on `cpu` or `disk`."""
    if placement is not Placement.CUSTOM or places is None:
        return []
    own, experts = records(request, placement), request.model.experts
    here = range(request.machines.ranks)
    kept = sum(
        experts * size
        for size, place in zip(own.units, places, strict=True)
        if place.store == "cpu" and place.rank in here
    )
    reading = len({place.rank for place in places if place.store == "disk" and place.rank in here})
    return [
        Term("teacher parts", kept, f"units on cpu of {experts} experts"),
        Term(
            "disk buffers", reading * DISK_BLOCKS * own.block, f"{reading} x {DISK_BLOCKS} x {format_bytes(own.block)}"
        ),
    ]


def forward_terms(
    request: PlanRequest, placement: Placement, rank: int, places: DeviceMap | None, rows: int, requests: int
) -> list[Term]:
    """What the device of `rank` holds while the teacher computes.

    Args:
        rows: of one request, both halves of guidance counted.
        requests: that wait together, as many on every rank.
    """
    if placement is Placement.CPU:
        return []
    piece = min(request.teacher_micro_batch or rows, rows)
    run = teacher_pass(request, placement, piece)
    if places is not None:
        return _stage_forward(request, placement, rank, places, run, rows)
    if SPECS[placement].fed or records(request, placement).wide:  # the engine: all requests pass a block together
        peak, others = block_peak(run), (requests * rows - piece) * state_bytes(run, 1)
        formula = f"a block for {piece} rows {format_bytes(peak)} + states of the other rows {format_bytes(others)}"
        return [Term("teacher activations", peak + others, formula), *_feature_terms(request, run, requests * rows)]
    peak, inputs = forward_peak(run).total, 4 * (run.sizes.latents + run.sizes.text) * rows // piece
    formula = f"{piece} rows of {request.tokens:,} tokens {format_bytes(peak)} + inputs {format_bytes(inputs)}"
    return [Term("teacher activations", peak + inputs, formula), *_feature_terms(request, run, rows)]


def _stage_forward(
    request: PlanRequest, placement: Placement, rank: int, places: DeviceMap, run: Pass, rows: int
) -> list[Term]:
    if all(place.rank != rank for place in places):
        answers = run.compute.stored * run.sizes.velocity * rows // run.batch
        return [Term("teacher answers", answers, f"velocities of {rows} rows")]
    peak = forward_peak(run).total
    formula = f"{run.batch} rows of {request.tokens:,} tokens"
    terms = [Term("teacher activations", peak, formula), *states_under_way(request, placement, rank, places, run.batch)]
    if places[0].rank == rank:
        asking = request.machines.world if SPECS[placement].whole_job else request.machines.ranks
        each = run.compute.stored * (run.sizes.latents + run.sizes.text) * rows // run.batch
        at_once = min(asking, 2)
        terms.append(Term("teacher inputs", at_once * each, f"of {at_once} ranks x {format_bytes(each)}"))
    return [*terms, *_feature_terms(request, run, run.batch)]


def states_under_way(request: PlanRequest, placement: Placement, rank: int, places: DeviceMap, rows: int) -> list[Term]:
    """What a rank of a pipeline sends and receives between stages; the last of it stays until the next request.

    Args:
        rows: of a batch.
    """
    passed = sum(before.rank != after.rank and rank in (before.rank, after.rank) for before, after in pairwise(places))
    if not passed:
        return []
    run = teacher_pass(request, placement, min(request.teacher_micro_batch or rows, rows))
    state = state_bytes(run, run.batch)
    formula = f"{passed} x {EXCHANGES} exchanges under way x {format_bytes(state)}"
    return [Term("teacher states", passed * EXCHANGES * state, formula)]


def _feature_terms(request: PlanRequest, run: Pass, rows: int) -> list[Term]:
    """Features kept while the pass runs, joined and widened at its end."""
    count = request.kept_features
    if not count:
        return []
    per_row = request.tokens * request.model.architecture.hidden_size
    samples = rows // 2 if request.guided else rows
    size = count * per_row * (2 * run.compute.hidden * rows + 4 * samples)
    return [Term("teacher features", size, f"{count} blocks x {format_bytes(size // count)}, kept, joined, in float32")]


def teacher_pass(request: PlanRequest, placement: Placement, rows: int) -> Pass:
    """A forward in the precision of the placement's compute."""
    return request.teacher_pass(rows, compute_bytes(request, placement))
