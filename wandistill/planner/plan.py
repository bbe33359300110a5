"""The plan: one row for each placement, fits or the reason, and the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from wandistill.device_map import DeviceMap, Place
from wandistill.errors import DoesNotFit
from wandistill.planner.memory import NodeMemory, node_memory, rank_memory
from wandistill.planner.placements import AUTO, SPECS, Placement, find_placement
from wandistill.planner.rates import Rates
from wandistill.planner.request import PlanRequest
from wandistill.planner.student_memory import StudentMemory, student_memory
from wandistill.planner.teacher_memory import records, spread
from wandistill.planner.terms import Phases, Term
from wandistill.planner.timing import StepTime, blocks_to_keep, step_time, with_fetch
from wandistill.units import format_bytes

# Where memory lacks: on the node, beside the GPU of a rank.
HOST = "the node's memory"


@dataclass(frozen=True)
class Lack:
    """What a placement has too little of."""

    where: str  # rank 0's GPU, the node's memory, the disk
    needed: int
    available: int
    largest: Term

    @property
    def missing(self) -> int:
        """Bytes too few."""
        return self.needed - self.available

    def __str__(self) -> str:
        return (
            f"{self.where} lacks {format_bytes(self.missing)}: {format_bytes(self.needed)} needed, "
            f"{format_bytes(self.available)} there; the largest term is {self.largest.name}, "
            f"{format_bytes(self.largest.size)}"
        )


@dataclass(frozen=True)
class Row:
    """One placement."""

    placement: Placement
    fits: bool
    within_margin: bool  # leaves the margin free
    reason: str  # why it does not fit, or is not considered; empty if it fits
    ranks: Sequence[Phases] = ()  # device of each rank: of a node, or of the job for gpu0 and custom
    node: NodeMemory | None = None
    time: StepTime | None = None
    settings: dict[str, str] = field(default_factory=dict)  # flags that the plan relies on
    lack: Lack | None = None
    places: DeviceMap | None = None

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max((rank.peak for rank in self.ranks), default=0)

    def settled(self, request: PlanRequest) -> PlanRequest:
        """`request` with what the plan settled of `stream`."""
        if self.placement is not Placement.STREAM or not self.settings:
            return request
        kept = int(self.settings["resident_blocks"])
        return request.change(stream_fetch=self.settings["stream_fetch"], resident_blocks=kept)


@dataclass(frozen=True)
class Plan:
    """The answer to a request."""

    request: PlanRequest
    rows: Sequence[Row]
    choice: Row | None
    why: str

    def row(self, placement: Placement) -> Row:
        """The row of a placement."""
        return next(row for row in self.rows if row.placement is placement)


def plan(request: PlanRequest, rates: Rates | None = None) -> Plan:
    """Evaluates every placement and chooses.

    Args:
        rates: speeds as a probe measured them; else the catalogue's.

    Raises:
        ConfigError: the request names a placement that does not exist, or a resolution that cannot be.
    """
    student = student_memory(request)
    rows = [evaluate(request, student, placement, rates) for placement in Placement]
    if request.placement != AUTO:
        wanted = find_placement(request.placement)
        row = next(row for row in rows if row.placement is wanted)
        return Plan(request, rows, row if row.fits else None, row.reason or _headroom(request, row))
    choice, why = choose(request, rows)
    return Plan(request, rows, choice, why)


def evaluate(request: PlanRequest, student: StudentMemory, placement: Placement, rates: Rates | None = None) -> Row:
    """One placement of `request`, whose student is `student`."""
    spec, machines = SPECS[placement], request.machines
    if placement is Placement.CUSTOM and request.device_map is None:
        return Row(placement, False, False, "takes a --teacher_device_map FILE")
    if spec.min_ranks > (machines.world if spec.whole_job else machines.ranks):
        return Row(placement, False, False, "with one rank it is gpu")
    # All ranks fill caches.
    trains = request.teacher_rank_trains != "no" or not request.trains
    row = _evaluate(request, student, placement, rates, teacher_trains=trains)
    spared = placement is Placement.GPU0 and request.trains and request.teacher_rank_trains == "auto"
    if spared and not row.within_margin:
        served = _evaluate(request, student, placement, rates, teacher_trains=False)
        if served.within_margin or (served.fits and not row.fits):
            return served
    return row


def _evaluate(
    request: PlanRequest,
    student: StudentMemory,
    placement: Placement,
    rates: Rates | None,
    *,
    teacher_trains: bool,
) -> Row:
    machines, spec, settings = request.machines, SPECS[placement], {}
    places: DeviceMap | None = None
    timed = request
    serves_only = placement is Placement.GPU0 and not teacher_trains
    if placement is Placement.GPU0:
        settings["teacher_rank_trains"] = "no" if serves_only else "yes"
    if spec.side_stream:
        room = _room(request, student) if placement is Placement.SEQUENTIAL and request.on_gpu else None
        try:
            places = spread(request, placement, room)
        except DoesNotFit:
            return _without_room(request, placement, room)
        if placement is Placement.SEQUENTIAL and room is not None:
            settings["max_memory"] = str(request.max_memory or room)
    if placement is Placement.STREAM:
        if request.resident_blocks is None:
            request = request.change(resident_blocks=_resident_blocks(request, student, rates))
        timed = with_fetch(request, rates)
        settings = {"stream_fetch": timed.stream_fetch, "resident_blocks": str(request.resident_blocks)}
    ranks = _ranks(request, student, placement, places, serves_only=serves_only)
    local = ranks[: machines.ranks]
    node = node_memory(request, student, placement, local, places)
    time = step_time(timed, placement, places, serves_only=serves_only, rates=rates)
    lack = _lack(request, ranks, node, 0.0)
    tight = _lack(request, ranks, node, request.memory_margin)
    return Row(
        placement,
        lack is None,
        tight is None,
        str(lack) if lack else "",
        ranks,
        node,
        time,
        settings,
        lack or tight,
        places,
    )


def _without_room(request: PlanRequest, placement: Placement, room: int | None) -> Row:
    """A teacher that cannot be spread block by block over the room that there is."""
    each = request.max_memory if request.max_memory is not None else room or 0
    ranks = request.machines.ranks
    needed = request.model.experts * records(request, placement).total
    room_text = f"{format_bytes(each)} on each of {ranks} ranks"
    text = f"the teacher's {format_bytes(needed)} do not fit, block by block, in {room_text}"
    lack = (
        Lack("the GPUs' memory", needed, ranks * each, Term("teacher weights", needed))
        if needed > ranks * each
        else None
    )
    return Row(placement, False, False, text, lack=lack)


def _ranks(
    request: PlanRequest,
    student: StudentMemory,
    placement: Placement,
    places: DeviceMap | None,
    *,
    serves_only: bool,
) -> Sequence[Phases]:
    """The device of each rank; ranks that are alike share their terms."""
    machines, spec = request.machines, SPECS[placement]
    count = machines.world if spec.whole_job else machines.ranks
    alike = places is None and placement is not Placement.SHARDED
    holders = {place.rank for place in places or ()}
    made: dict[object, Phases] = {}
    ranks = []
    for rank in range(count):
        trains = not (serves_only and rank == request.teacher_rank)
        kind = (rank == 0, trains) if alike or (places is not None and rank not in holders) else rank
        if kind not in made:
            made[kind] = rank_memory(request, student, placement, rank, places, trains=trains)
        ranks.append(made[kind])
    return ranks


def _resident_blocks(request: PlanRequest, student: StudentMemory, rates: Rates | None) -> int:
    """Blocks of each expert that `stream` keeps on the GPU: as many as spare time, if the margin stays free."""
    wanted = blocks_to_keep(request, rates) if request.on_gpu else 0
    if not wanted:
        return 0
    bare = request.change(resident_blocks=0)
    peak = max(rank.peak for rank in _ranks(bare, student, Placement.STREAM, None, serves_only=False))
    room = int(request.machines.device_memory * (1 - request.memory_margin)) - peak
    return max(min(wanted, room // (request.model.experts * records(bare, Placement.STREAM).block)), 0)


def _room(request: PlanRequest, student: StudentMemory) -> int:
    """Teacher bytes that a rank's device has room for beside its student and the margin, for sequential."""
    layers = request.model.architecture.num_layers
    everything = rank_memory(request, student, Placement.SEQUENTIAL, 0, (Place(0),) * (layers + 2), trains=True)
    rest = max(
        sum(term.size for term in terms if term.name != "teacher weights") for terms in everything.phases.values()
    )
    return max(int(request.machines.device_memory * (1 - request.memory_margin)) - rest, 0)


def _lack(request: PlanRequest, ranks: Sequence[Phases], node: NodeMemory, margin: float) -> Lack | None:
    """The first thing of which there is too little, or less than `margin` is left free."""
    machines = request.machines
    if request.on_gpu:
        room = int(machines.device_memory * (1 - margin))
        index = max(range(len(ranks)), key=lambda rank: ranks[rank].peak)
        if ranks[index].peak > room:
            return Lack(f"rank {index}'s GPU", ranks[index].peak, room, _largest(ranks[index].terms))
    room = int(machines.host_memory * (1 - margin))
    if node.host.peak > room:
        return Lack(HOST, node.host.peak, room, _largest(node.host.terms))
    if machines.disk is not None and node.disk > machines.disk:
        return Lack("the disk", node.disk, machines.disk, Term("checkpoints", node.disk))
    return None


def _largest(terms: Sequence[Term]) -> Term:
    return max(terms, key=lambda term: term.size)


def choose(request: PlanRequest, rows: Sequence[Row]) -> tuple[Row | None, str]:
    """gpu where it leaves the margin free, else the fastest that does."""
    free = [row for row in rows if row.within_margin]
    gpu = next((row for row in free if row.placement is Placement.GPU), None)
    if gpu is not None:
        return gpu, "gpu fits, and no placement is faster"
    if free:
        best = max(free, key=lambda row: row.time.samples_per_second if row.time else 0.0)
        return best, f"the fastest of the {len(free)} that fit"
    tight = [row for row in rows if row.fits]
    if tight:
        names = ", ".join(row.placement.value for row in tight)
        return None, f"{names} would fit, but leave less than {request.memory_margin:.0%} free"
    return None, "no placement fits"


def _headroom(request: PlanRequest, row: Row) -> str:
    if row.within_margin:
        return "asked for, and it fits"
    return f"asked for; it fits, but leaves less than {request.memory_margin:.0%} free"
