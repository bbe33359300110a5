"""Seconds of a training step under each placement, and of filling the caches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from wandistill.device_map import DeviceMap
from wandistill.planner.activations import Pass
from wandistill.planner.caches import rollouts_at_once
from wandistill.planner.fetch import OWN, SPLIT, choose_fetch, fetch_seconds
from wandistill.planner.placements import SPECS, Placement
from wandistill.planner.rates import COMPILED_GAIN, Rates, catalogue_rates
from wandistill.planner.records import TeacherBytes
from wandistill.planner.request import PlanRequest
from wandistill.planner.student_memory import student_bytes
from wandistill.planner.teacher_memory import records, teacher_pass
from wandistill.planner.updates import updates
from wandistill.planner.work import Work, block_work, forward_work, outer_work
from wandistill.units import format_bytes, format_seconds

# Backward computes two gradients for each product, and recomputes attention beside.
_BACKWARD = 2.0
_BACKWARD_ATTENTION = 2.5
# Prompts are stored without their padding; so many tokens has one of about 45 words.
_PROMPT_TOKENS = 64


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the slowest rank."""

    teacher: float  # from the first request to the last answer
    busy: float  # of it, while a rank that trains computes for the teacher or waits for its weights
    student: float  # forward and backward of all micro-batches
    optimizer: float
    communication: float  # of gradients, as far as it is not hidden
    step: float
    samples_per_second: float
    formulas: tuple[str, ...]

    @property
    def train(self) -> float:
        """All but the teacher's part."""
        return self.student + self.optimizer + self.communication

    def to_json(self) -> dict[str, object]:
        """As JSON."""
        return {
            "teacher_seconds": self.teacher,
            "student_seconds": self.student,
            "optimizer_seconds": self.optimizer,
            "communication_seconds": self.communication,
            "step_seconds": self.step,
            "samples_per_second": self.samples_per_second,
            "formulas": list(self.formulas),
        }


def step_time(
    request: PlanRequest,
    placement: Placement,
    places: DeviceMap | None,
    *,
    serves_only: bool,
    rates: Rates | None = None,
) -> StepTime:
    """The time of a step.

    Args:
        request: under `stream` with its fetch settled, see `with_fetch`.
        places: of a pipeline.
        serves_only: gpu0's teacher rank draws no samples.
        rates: as measured; else the catalogue's.
    """
    rates = rates or catalogue_rates(request.machines)
    steps = request.gradient_accumulation_steps
    answer = _Answers(0.0, 0.0, "teacher: its targets are cached")
    if request.targets == "online":
        answer = _teacher(request, placement, places, rates, serves_only)
    student, student_formula = _student(request, rates)
    optimizer, optimizer_formula = _optimizer(request, rates)
    communication = _communication(request, rates, student)
    trainers = request.machines.world - serves_only
    train = student + optimizer + communication
    # A step's answers are asked for while the student takes the step before.
    step = max(answer.seconds, answer.busy + train)
    samples = request.batch_size * steps * trainers
    formulas = (
        answer.formula,
        student_formula,
        optimizer_formula,
        f"gradients between ranks, not hidden: {format_seconds(communication)}",
    )
    return StepTime(answer.seconds, answer.busy, student, optimizer, communication, step, samples / step, formulas)


def forward_seconds(run: Pass, rates: Rates) -> float:
    """One forward on a device, by the rates of its arithmetic and memory."""
    return work_seconds(forward_work(run), run.compute.hidden, rates)


def work_seconds(work: Work, width: int, rates: Rates) -> float:
    """Seconds of `work` with `width` bytes an element."""
    rate = rates.half if width == 2 else rates.float32
    products = max((work.matrix_flops + work.attention_flops) / rate, work.weights / rates.memory)
    return products + work.traffic / rates.memory


def training_seconds(work: Work, width: int, rates: Rates, *, again: bool) -> float:
    """Seconds of a forward of `work` and its backward; `again`: the backward computes the forward once more."""
    back = Work(
        _BACKWARD * work.matrix_flops,
        _BACKWARD_ATTENTION * work.attention_flops,
        _BACKWARD * work.traffic,
        _BACKWARD * work.weights,
    )
    return (2 if again else 1) * work_seconds(work, width, rates) + work_seconds(back, width, rates)


def widening_seconds(own: TeacherBytes, dtype: str, rates: Rates) -> float:
    """Seconds to turn a stored block to what is computed with, by the memory's rate; 0 where it is computed as stored.

    The stored block is read and the wide one written; float8, which has no arithmetic, is scaled where it was written.
    """
    passes = 3 if dtype == "float8" else 1
    return rates.widening * (own.block + passes * own.wide) / rates.memory if own.wide else 0.0


def _student(request: PlanRequest, rates: Rates) -> tuple[float, str]:
    """Seconds of all micro-batches: the blocks, and once for each what lies outside them."""
    run, steps = request.student_pass(request.batch_size), request.gradient_accumulation_steps
    width, again, layers = run.compute.hidden, request.gradient_checkpointing, run.architecture.num_layers
    if rates.outside is None:
        one = rates.student * training_seconds(forward_work(run), width, rates, again=again)
        return steps * one, f"student: {steps} x forward and backward = {format_seconds(steps * one)}"
    block = rates.student * training_seconds(block_work(run), width, rates, again=again)
    outside = max(training_seconds(outer_work(run), width, rates, again=False) + rates.outside, 0.0)
    seconds = steps * (layers * block + outside)
    return seconds, (
        f"student: {steps} x forward and backward of {layers} blocks x {format_seconds(block)} + outside them "
        f"{format_seconds(outside)} = {format_seconds(seconds)}"
    )


def _optimizer(request: PlanRequest, rates: Rates) -> tuple[float, str]:
    """Seconds of clipping and update: what the memory takes, or on a GPU the host for its calls if that is slower."""
    ranks, width = request.machines.world if request.sharded_student else 1, request.model.architecture.hidden_size
    own = student_bytes(request.student, request.optimizer, ranks, width, request.kept_features)
    traffic = (3 * own.weights + 2 * own.gradients + 2 * own.moments) / rates.memory
    said = f"{format_bytes(own.weights)} weights with gradients and moments {format_seconds(traffic)}"
    if not request.on_gpu:
        return traffic, f"optimizer: {said}"
    many = updates(request.student, ranks, width, request.kept_features)
    host = many.host_seconds(request.optimizer, rates.operation, rates.launch)
    return max(traffic, host), (
        f"optimizer: the longer of {said} and the host's calls for {many.joined + many.alone} parameters, of which "
        f"{many.alone} on their own, {format_seconds(host)}"
    )


def _communication(request: PlanRequest, rates: Rates, student: float) -> float:
    world = request.machines.world
    if world == 1:
        return 0.0
    link = rates.peer_link if request.machines.nodes == 1 else min(rates.network, rates.peer_link)
    whole = student_bytes(
        request.student, request.optimizer, 1, request.model.architecture.hidden_size, request.kept_features
    )
    passes = 2.0 if not request.sharded_student else 1.0 + 2.0 * request.gradient_accumulation_steps
    moved = passes * (world - 1) / world * whole.gradients
    # It runs beside the last micro-batch's backward, two thirds of its time.
    hidden = student / request.gradient_accumulation_steps * 2 / 3
    return max(0.0, moved / link - hidden)


class _Answers(NamedTuple):
    """The teacher's part of a step."""

    seconds: float  # see `StepTime.teacher`
    busy: float  # see `StepTime.busy`
    formula: str


def _teacher(
    request: PlanRequest,
    placement: Placement,
    places: DeviceMap | None,
    rates: Rates,
    serves_only: bool,
) -> _Answers:
    """The answers of a step, and how they come about."""
    own, ranks = records(request, placement), request.machines.ranks
    compute = _compute(request, placement, rates)
    said = format_seconds(compute)
    if placement is Placement.CPU:
        flops = request.gradient_accumulation_steps * _flops(request, placement)
        formula = f"teacher: {flops * ranks / 1e12:.1f} TFLOP on {request.machines.cores} cores, {said}"
        return _Answers(compute, compute, formula)
    if placement is Placement.GPU:
        return _Answers(compute, compute, f"teacher: compute {said}")
    if placement is Placement.GPU0:
        asking = request.machines.world - serves_only
        seconds = asking * compute
        return _Answers(seconds, 0.0 if serves_only else seconds, f"teacher: {asking} ranks x {said} on one GPU")
    if places is not None:
        return _pipeline(request, placement, places, compute)
    seconds, formula = _fed(request, placement, rates, own, compute)
    return _Answers(seconds, seconds, formula)


def _compute(request: PlanRequest, placement: Placement, rates: Rates) -> float:
    """Seconds of compute on one device for what one rank asks in a step."""
    on_cores = placement is Placement.CPU
    if on_cores:
        rates = rates.on_cores(request.machines)
    own = records(request, placement)
    one = rates.teacher * forward_seconds(teacher_pass(request, placement, request.teacher_piece), rates)
    gain = COMPILED_GAIN if request.teacher_compile and request.on_gpu and not on_cores else 1.0
    asked = request.gradient_accumulation_steps * one * request.teacher_rows / request.teacher_piece / gain
    # Once a pass, which all requests of a step share.
    return asked + own.layers * widening_seconds(own, request.teacher_dtype, rates)


def _streamed(request: PlanRequest, own: TeacherBytes) -> int:
    """Bytes of an expert's blocks that `stream` brings to each rank in a step."""
    return (own.layers - (request.resident_blocks or 0)) * own.block


def blocks_to_keep(request: PlanRequest, rates: Rates | None = None) -> int:
    """How many of an expert's blocks `stream` must keep on the GPU so that compute hides the link; all, if none do."""
    rates = rates or catalogue_rates(request.machines)
    own = records(request, Placement.STREAM)
    link = fetch_seconds(request, rates, own.layers * own.block, OWN)
    return max(math.ceil(own.layers * (1 - _compute(request, Placement.STREAM, rates) / link)), 0)


def with_fetch(request: PlanRequest, rates: Rates | None = None) -> PlanRequest:
    """The question of a run at `stream` with its `stream_fetch` settled: own or split.

    Args:
        rates: as measured; else the catalogue's.
    """
    rates = rates or catalogue_rates(request.machines)
    moved = _streamed(request, records(request, Placement.STREAM))
    compute = _compute(request, Placement.STREAM, rates)
    return request.change(stream_fetch=choose_fetch(request, rates, moved, compute))


def _flops(request: PlanRequest, placement: Placement) -> float:
    work = forward_work(teacher_pass(request, placement, request.teacher_rows))
    return work.matrix_flops + work.attention_flops


def _pipeline(request: PlanRequest, placement: Placement, places: DeviceMap, compute: float) -> _Answers:
    """Batches of all ranks through all stages: the slowest stage for each, and the first one's way through the rest,
    in which a rank trains."""
    blocks = places[1:-1]
    stages = [
        sum(place.rank == rank for place in blocks) / len(blocks) for rank in dict.fromkeys(p.rank for p in places)
    ]
    asking = request.machines.world if SPECS[placement].whole_job else request.machines.ranks
    pieces = asking * request.gradient_accumulation_steps * -(-request.teacher_rows // request.teacher_piece)
    piece = compute * asking / pieces
    slowest = max(stages) * piece
    return _Answers(
        (pieces - 1) * slowest + piece,
        pieces * slowest,
        f"teacher: {pieces} batches x {format_seconds(piece)}, {len(stages)} stages, slowest {max(stages):.0%}",
    )


def _fed(
    request: PlanRequest, placement: Placement, rates: Rates, own: TeacherBytes, compute: float
) -> tuple[float, str]:
    """Blocks that come beside compute, or with one slot in turn with it."""
    ranks, streams = request.machines.ranks, placement is Placement.STREAM
    moved = _streamed(request, own) if streams else own.layers * own.block
    read = moved
    if placement is Placement.SHARDED:
        link, way = moved * (ranks - 1) / ranks / rates.peer_link, "from peers"
    elif placement is Placement.DISK:
        # As the files have it: other dtypes are converted once read.
        read = request.model.block_bytes * own.layers if request.model.block_bytes else moved
        link, way = read * ranks / rates.disk, f"from disk for {ranks} ranks"
    elif streams and request.stream_fetch == SPLIT:
        link, way = fetch_seconds(request, rates, moved, SPLIT), f"1/{ranks} from the host, the rest from peers"
    else:
        link, way = fetch_seconds(request, rates, moved, OWN), "from the host"
    # A copy writes to the same memory that compute reads.
    beside = compute + 2 * moved / rates.memory if request.on_gpu else compute
    first = link * own.block / max(moved, own.block)
    both = max(beside, link) + min(first, compute / own.layers)
    seconds = both if SPECS[placement].slots > 1 else compute + link
    return seconds, (
        f"teacher: compute {format_seconds(compute)}, {format_bytes(read)} {way} in {format_seconds(link)}, "
        + ("beside each other" if SPECS[placement].slots > 1 else "in turn")
    )


@dataclass(frozen=True)
class PrepareCost:
    """Filling the caches for `prompts` prompts."""

    prompts: int
    embedding_bytes: int
    embedding_seconds: float
    latent_bytes: int
    latent_seconds: float

    def to_json(self) -> dict[str, object]:
        """As JSON."""
        return {
            "prompts": self.prompts,
            "embedding_bytes": self.embedding_bytes,
            "embedding_seconds": self.embedding_seconds,
            "latent_bytes": self.latent_bytes,
            "latent_seconds": self.latent_seconds,
        }


def prepare_cost(
    request: PlanRequest,
    placement: Placement,
    places: DeviceMap | None,
    *,
    prompts: int,
    rollout_steps: int,
    rates: Rates | None = None,
) -> PrepareCost:
    """What `wandistill prepare` takes with one rollout a prompt, on all ranks.

    Args:
        request: under `stream` with its fetch settled, see `with_fetch`.
    """
    rates = rates or catalogue_rates(request.machines)
    model, world = request.model, request.machines.world
    encoder = model.text_encoder
    flops = 2 * (encoder.parameters - encoder.vocab_size * encoder.d_model) * model.token_length
    rate = rates.half if request.on_gpu else rates.float32
    width = 2 if request.on_gpu and request.teacher_dtype != "float32" else 4
    batch = rollouts_at_once(request)
    asking = request.change(batch_size=batch, gradient_accumulation_steps=1)
    seconds = _teacher(asking, placement, places, rates, False).seconds
    latents = request.student_pass(1).sizes.latents
    return PrepareCost(
        prompts=prompts,
        embedding_bytes=prompts * min(_PROMPT_TOKENS, model.token_length) * encoder.d_model * width,
        embedding_seconds=prompts * flops / rate / world,
        latent_bytes=prompts * 4 * latents,
        latent_seconds=prompts * rollout_steps * seconds / (batch * world),
    )
