"""The sizes of a pool's pods, from the planner: memory, /dev/shm, processor, threads and the resolved placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from wandistill.catalog import Gpu, Model
from wandistill.errors import DoesNotFit
from wandistill.planner.caches import encoding, text_encoder
from wandistill.planner.memory import PROCESS, NodeMemory, node_memory, rank_memory
from wandistill.planner.placements import AUTO, Placement, find_placement
from wandistill.planner.plan import Row, choose, evaluate
from wandistill.planner.request import Machines, PlanRequest
from wandistill.planner.student_memory import StudentMemory, student_memory
from wandistill.planner.teacher_memory import spread
from wandistill.planner.terms import Phases
from wandistill.planner.timing import step_time
from wandistill.units import GIB, MIB, format_bytes

_UNLIMITED = 2**50
# Beside the ranks: the launcher with its endpoint and its report.
_SUPERVISOR = 256 * MIB
# NCCL's segments of the ranks of a node (its documentation recommends 1 GiB for a container), and gloo's.
_SHM_WITH_PEERS = GIB
_SHM_ALONE = 64 * MIB
_MOST_STUDENTS = 64
# Placements that the launcher may take in place of another.
FALLBACKS = tuple(each for each in Placement if each not in (Placement.CUSTOM, Placement.GPU0))
# Cores of a rank. A teacher on the CPU computes on them; without a GPU the pod says what it may take.
CORES = {"gpu": 4, "cpu": 8, "none": 1}
# Of the pod that encodes the prompts: a small text encoder keeps one core busy, a real one as many as it gets.
PREPARE_CORES = {True: 1, False: 8}
SCRATCH = {"gpu": "8Gi", "none": "2Gi"}


@dataclass(frozen=True)
class Question:
    """What the sizes of a pool depend on.

    Args:
        run: the question about one node of the pool, whose memory is not limited.
        nodes: of the pool.
    """

    run: PlanRequest
    nodes: int = 1
    replan: bool = False  # whether the launcher may change the placement when memory runs out

    @property
    def several_nodes(self) -> bool:
        """Whether there is more than one."""
        return self.nodes > 1

    def request(self) -> PlanRequest:
        """The question to the planner.

        Memory is that of one node; only gpu0 spans the job, and a rank alone on its node needs NCCL as soon as there
        are others. So more than two nodes are as two, and ranks that have peers anyway are as on one node.
        """
        run = self.run
        spread = self.several_nodes and (run.machines.ranks == 1 or run.placement == Placement.GPU0.value)
        return run.change_machines(nodes=2) if spread else run


def one_node(gpu: Gpu | None, ranks: int, gpu_memory: int | None = None) -> Machines:
    """A node of a pool; the pod gets the memory that its placement takes, so none is judged by what a node has."""
    cores = ranks * CORES["gpu" if gpu else "none"]
    return Machines(gpu=gpu, ranks=ranks, nodes=1, host_memory=_UNLIMITED, cores=cores, gpu_memory=gpu_memory)


@dataclass(frozen=True)
class Sizes:
    """Of one pod of a pool."""

    placement: Placement
    memory: int  # MiB, /dev/shm counted
    shm: int  # MiB
    settings: Mapping[str, str] = field(default_factory=dict)
    step_seconds: float | None = None  # of an optimizer step, as planned


def sizes(question: Question) -> Sizes:
    """The sizes under the asked placement, or under the one that auto takes.

    Raises:
        DoesNotFit: the placement does not fit, or none does.
        ConfigError: no such placement.
    """
    request = question.request()
    student = student_memory(request)
    row = _row(question, request, student)
    own = replace(row_sizes(request, row), step_seconds=_step_seconds(question, row))
    if not question.replan or not request.on_gpu:
        return own
    memory, shm = fallback_memory(request, [evaluate(request, student, placement) for placement in FALLBACKS])
    return replace(own, memory=max(memory, own.memory), shm=max(shm, own.shm))


def fallback_memory(request: PlanRequest, rows: Sequence[Row | None]) -> tuple[int, int]:
    """The most memory and /dev/shm in MiB that a placement of `rows` takes, whatever GPU it needs.

    After a GPU ran out the launcher takes any that fits the GPU and the pod's limit, with smaller micro-batches or
    checkpointing where it must: these take no more of the host. gpu0 takes less than those with a copy in it.
    """
    each = [pod_memory(request, row.node.host.peak, row.node.shm) for row in rows if row is not None and row.node]
    return max(memory for memory, _ in each), max(shm for _, shm in each)


def _row(question: Question, request: PlanRequest, student: StudentMemory) -> Row:
    if request.placement != AUTO:
        row = evaluate(request, student, find_placement(request.placement))
        if not row.fits:
            raise DoesNotFit(f"placement {request.placement}: {row.reason}")
        return row
    # A placement that spans the job is for those who ask for it, as soon as there are several nodes.
    skipped = {Placement.CUSTOM, Placement.GPU0} if question.several_nodes else {Placement.CUSTOM}
    rows = [evaluate(request, student, placement) for placement in Placement if placement not in skipped]
    choice, why = choose(request, rows)
    if choice is None:
        raise DoesNotFit(why)
    return choice


def teacher_and_students(question: Question, teacher_gpu: Gpu | None) -> tuple[Sizes, Sizes]:
    """The teacher's pod, which only serves, and a students' pod, under gpu0.

    Args:
        question: of the students' pool.
        teacher_gpu: of the teacher's pool.

    Raises:
        DoesNotFit: one of the GPUs is too small.
    """
    made = []
    for name, part in zip(("teacher", "students"), split(question.run, teacher_gpu), strict=True):
        room = part.request.machines.device_memory
        if part.request.on_gpu and part.device.peak > room:
            raise DoesNotFit(
                f"the GPU of pool {name} lacks {format_bytes(part.device.peak - room)}: "
                f"{format_bytes(part.device.peak)} needed, {format_bytes(room)} there"
            )
        made.append(part.sizes())
    return made[0], replace(made[1], step_seconds=_split_step_seconds(question, teacher_gpu))


def _step_seconds(question: Question, row: Row) -> float:
    """Of a step on all nodes of the pool."""
    request = row.settled(question.run).change_machines(nodes=question.nodes)
    serves_only = row.settings.get("teacher_rank_trains") == "no"
    return step_time(request, row.placement, row.places, serves_only=serves_only).step


def _split_step_seconds(question: Question, teacher_gpu: Gpu | None) -> float:
    """The teacher's pod works ahead while the students' train: the slower of them makes the step."""
    run = question.run
    alone = run.change(machines=one_node(teacher_gpu, 1))
    one = step_time(alone, Placement.GPU, None, serves_only=False).teacher
    students = run.change_machines(nodes=question.nodes + 1)
    train = step_time(students, Placement.GPU, None, serves_only=False).train
    return max(one * question.nodes * run.machines.ranks, train)


@dataclass(frozen=True)
class Part:
    """The teacher's or a students' pod of gpu0."""

    request: PlanRequest
    device: Phases
    node: NodeMemory

    def sizes(self) -> Sizes:
        """What the pod asks for."""
        memory, shm = pod_memory(self.request, self.node.host.peak, self.node.shm)
        return Sizes(Placement.GPU0, memory, shm, {"teacher_rank_trains": "no"})


def split(run: PlanRequest, teacher_gpu: Gpu | None) -> tuple[Part, Part]:
    """The teacher's pod and the students', each on its own kind of node.

    The teacher keeps the inputs of every rank that asks, some MB each; it is sized for `_MOST_STUDENTS` of them.
    """
    request = run.change(placement=Placement.GPU0.value, teacher_rank_trains="no").change_machines(nodes=2)
    serving = request.change_machines(gpu=teacher_gpu, ranks=1, nodes=_MOST_STUDENTS + 1, gpu_memory=None)
    student = student_memory(request)
    places = spread(request, Placement.GPU0, None)
    parts = []
    for asked, rank, trains in ((serving, 0, False), (request, 1, True)):
        device = rank_memory(asked, student, Placement.GPU0, rank, places, trains=trains)
        node = node_memory(asked, student, Placement.GPU0, [device] * asked.machines.ranks, places)
        parts.append(Part(asked, device, node))
    return parts[0], parts[1]


def row_sizes(request: PlanRequest, row: Row) -> Sizes:
    """The sizes that the row of a placement asks for."""
    assert row.node is not None
    memory, shm = pod_memory(request, row.node.host.peak, row.node.shm)
    # What the plan lets sequential fill of a GPU, the trainer measures itself.
    settings = {key: value for key, value in row.settings.items() if key == "teacher_rank_trains"}
    return Sizes(row.placement, memory, shm, settings)


def prepare_memory(model: Model) -> int:
    """Memory limit in MiB of the pod that encodes the prompts without a GPU, where no half precision is sure."""
    request = PlanRequest(
        model=model,
        student=model.architecture,
        student_name=model.name,
        machines=one_node(None, 1),
        width=1,
        height=1,
        teacher_dtype="float32",
        trains=False,
    )
    host = PROCESS + text_encoder(request).size + encoding(request).size
    return _mib(host / (1 - request.memory_margin) + _SHM_ALONE)


def pod_memory(request: PlanRequest, host: int, shm: int) -> tuple[int, int]:
    """Memory limit and size of /dev/shm in MiB of a pod whose ranks take `host` bytes, `shm` of them in /dev/shm."""
    beside = _SHM_WITH_PEERS if request.on_gpu and request.machines.world > 1 else _SHM_ALONE
    memory = host / (1 - request.memory_margin) + beside + _SUPERVISOR
    return _mib(memory), _mib(shm + beside)


def _mib(size: float) -> int:
    return int(-(-size // MIB))
