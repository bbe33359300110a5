"""What a student in training holds: weights, gradients, moments, average, and the buffers of its parallelism.

Follows `wandistill.train.student.TrainedStudent` and `wandistill.train.optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod
from typing import NamedTuple

from wandistill.architecture import WanArchitecture
from wandistill.planner.activations import Peak, training_peak
from wandistill.planner.parameters import ParameterTensor, block_tensors, outer_tensors, projection_tensors
from wandistill.planner.request import PlanRequest
from wandistill.planner.terms import Term, count_bytes
from wandistill.planner.updates import ROW
from wandistill.units import format_bytes

# torchao's 8-bit moments: numbers in blocks of 256 with a float32 scale each, and a table of 256 float32 a moment.
# Tensors of fewer than 4,096 elements, or not a multiple of 256, keep moments in their own dtype (_new_buffer).
_MOMENT_BLOCK = 256
_MOMENT_TABLE = 1024
_SMALLEST_8BIT = 4096


class StudentBytes(NamedTuple):
    """Bytes on one rank."""

    parameters: int  # elements of the whole student
    weights: int
    gradients: int
    moments: int
    average: int  # in float32
    largest: int  # bytes of float32 of the largest parameter on this rank
    block: int  # weights of one whole block
    outer: int  # weights outside the blocks, whole


@lru_cache(maxsize=512)
def student_bytes(
    architecture: WanArchitecture, optimizer: str, ranks: int, teacher_width: int, features: int
) -> StudentBytes:
    """The student on each of `ranks` ranks that it is sharded over (1: whole).

    FSDP2 shards each parameter's rows, the last rank's part padded to the others' size; with half-precision weights
    Wan's float32 parts, and the projections of features, stay whole.
    """
    half = optimizer != "adamw"
    blocks, outer = block_tensors(architecture), outer_tensors(architecture)
    projections = projection_tensors(architecture.hidden_size, teacher_width, features)
    stored = 2 if half else 4

    def size(tensor: ParameterTensor) -> int:
        """Elements on this rank."""
        if ranks == 1 or (half and tensor.float32):
            return tensor.numel
        return -(-tensor.shape[0] // ranks) * prod(tensor.shape[1:])

    def width(tensor: ParameterTensor) -> int:
        return 4 if tensor.float32 else stored

    def everywhere(of: Callable[[ParameterTensor], int]) -> int:
        return architecture.num_layers * _sum(of, blocks) + _sum(of, outer) + _sum(of, projections)

    def moments(tensor: ParameterTensor) -> int:
        return 2 * _moment(size(tensor), width(tensor), eight_bit=optimizer == "adamw8bit")

    weights = everywhere(lambda tensor: size(tensor) * width(tensor))
    return StudentBytes(
        parameters=everywhere(lambda tensor: tensor.numel),
        weights=weights,
        gradients=weights,
        moments=everywhere(moments),
        average=everywhere(lambda tensor: 4 * size(tensor)),
        largest=4 * max(size(tensor) for tensor in (*blocks, *outer, *projections)),
        block=_sum(lambda tensor: tensor.numel * width(tensor), blocks),
        outer=_sum(lambda tensor: tensor.numel * width(tensor), (*outer, *projections)),
    )


def _sum(of: Callable[[ParameterTensor], int], tensors: Iterable[ParameterTensor]) -> int:
    return sum(of(tensor) for tensor in tensors)


def _moment(elements: int, width: int, *, eight_bit: bool) -> int:
    if eight_bit and elements >= _SMALLEST_8BIT and elements % _MOMENT_BLOCK == 0:
        return elements + 4 * (elements // _MOMENT_BLOCK) + _MOMENT_TABLE
    return elements * width


class StudentMemory(NamedTuple):
    """Terms of a rank's student, and where its gradients are."""

    bytes: StudentBytes
    peak: Peak  # of forward and backward
    always: tuple[Term, ...]
    lasting_gradients: tuple[Term, ...]  # gradients that are there from step to step, or micro-batch to micro-batch
    backward: tuple[Term, ...]
    optimizer: tuple[Term, ...]


def student_memory(request: PlanRequest) -> StudentMemory:
    """The student of `request` on each rank that trains."""
    world = request.machines.world
    ranks = world if request.sharded_student else 1
    width = request.model.architecture.hidden_size
    own = student_bytes(request.student, request.optimizer, ranks, width, request.kept_features)
    ddp = world > 1 and not request.sharded_student
    accumulates = request.gradient_accumulation_steps > 1
    # DDP's buckets are allocated once, with the gradients as views; elsewhere zero_grad() frees the gradients.
    fresh = not ddp and not accumulates
    peak = training_peak(
        request.student_pass(request.batch_size),
        checkpointing=request.gradient_checkpointing,
        fresh=fresh,
        one_block=request.sharded_student,
        features=request.kept_features,
        teacher_width=width,
    )
    note = f" / {ranks} ranks" if ranks > 1 else ""
    stored = 2 if request.half_weights else 4
    always = [
        Term(
            "student weights",
            own.weights,
            count_bytes(own.parameters, stored, "parameters") + note + (", float32 parts apart" if stored == 2 else ""),
        ),
        Term("student moments", own.moments, _moments_formula(request, own) + note),
    ]
    if request.ema_device == "gpu":
        always.append(Term("student average", own.average, count_bytes(own.parameters, 4, "parameters") + note))
    gradients = count_bytes(own.parameters, stored, "parameters") + note
    lasting: list[Term] = []
    backward: list[Term] = []
    if request.sharded_student:
        always.append(
            Term(
                "fsdp buffers",
                own.outer + 3 * own.block,
                f"outer weights {format_bytes(own.outer)} + 3 blocks gathered x {format_bytes(own.block)}",
            )
        )
        if accumulates:  # without synchronisation FSDP2 keeps the gradients of micro-batches whole
            whole = student_bytes(request.student, request.optimizer, 1, width, request.kept_features)
            lasting.append(
                Term(
                    "student gradients",
                    whole.gradients,
                    count_bytes(own.parameters, stored, "parameters") + ", whole until the last micro-batch",
                )
            )
        else:
            backward.append(Term("student gradients", own.gradients, gradients))
        backward.append(
            Term(
                "fsdp gradient buffers",
                2 * own.block + peak.gradients,
                f"2 blocks to reduce x {format_bytes(own.block)} + new {format_bytes(peak.gradients)}",
            )
        )
    elif ddp:
        lasting.append(Term("student gradients", own.gradients, gradients + ", views of DDP's buckets"))
    elif accumulates:
        backward.append(Term("student gradients", own.gradients, gradients))
    else:
        backward.append(
            Term(
                "student gradients", peak.gradients, f"{format_bytes(peak.gradients)} of {format_bytes(own.gradients)}"
            )
        )
    if peak.casts:
        backward.append(Term("autocast weights", peak.casts, "half-precision copies of the student's weights"))
    names = ", ".join(f"{name} {format_bytes(size)}" for name, size in peak.largest[:4])
    backward.append(Term("student activations", peak.activations, f"at the peak: {names}, ..."))
    step = [Term("student gradients", own.gradients, gradients)] if not lasting else []
    step.append(_optimizer_step(request, own))
    return StudentMemory(own, peak, tuple(always), tuple(lasting), tuple(backward), tuple(step))


def _moments_formula(request: PlanRequest, own: StudentBytes) -> str:
    each = {"adamw": 8.0, "adamw_bf16": 4.0, "adamw8bit": 2 + 8 / _MOMENT_BLOCK}[request.optimizer]
    return count_bytes(own.parameters, each, "parameters")


def _optimizer_step(request: PlanRequest, own: StudentBytes) -> Term:
    """What the update needs beside gradients and moments."""
    if request.optimizer == "adamw" and request.on_gpu:
        return Term("optimizer step", 0, "AdamW fused: in place")
    if request.optimizer == "adamw":
        return Term("optimizer step", 2 * own.largest, f"2 x the largest parameter, {format_bytes(own.largest)}")
    # torchao updates one parameter at a time, or a row of small ones, in float32.
    widest = max(own.largest, ROW * 4)
    return Term("optimizer step", 3 * widest, f"3 float32 copies of what is updated at a time, {format_bytes(widest)}")
