"""Memory of each rank's device and of each node, by term and phase.

A run goes through phases, each with its own peak: the text encoder fills the embedding cache, the teacher rolls out the
latents and with 8-bit storage is compared with a bfloat16 one, then every step asks the teacher, runs the student
forward and backward and updates it, and at times rank 0 draws samples with the VAE. What lasts is in all phases that
follow its begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wandistill.catalog import Gpu
from wandistill.device_map import DeviceMap
from wandistill.planner.caches import encoding, rollout_rows, sampling, text_encoder
from wandistill.planner.fetch import may_split
from wandistill.planner.placements import SPECS, Placement, Store
from wandistill.planner.quantization import compares, comparing, comparing_on_node
from wandistill.planner.request import PlanRequest
from wandistill.planner.student_memory import StudentMemory
from wandistill.planner.teacher_memory import (
    DISK_BLOCKS,
    forward_terms,
    records,
    states_under_way,
    stored_terms,
    weight_terms,
)
from wandistill.planner.terms import Phases, Term, total
from wandistill.units import GIB, MIB, format_bytes

# Not measured on each card: a CUDA context with torch's kernels loaded as they are used, and NCCL's buffers of one
# communicator. The probe of a run replaces both by what it sees.
CUDA_CONTEXT = 576 * MIB
NCCL_COMMUNICATOR = 320 * MIB
# cuBLAS takes a workspace for each thread that multiplies (torch's aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB from
# compute capability 9.0 on, 8.125 MiB before), the main one and autograd's, and for a stream of its own that a pipeline
# computes on.
_WORKSPACE = {True: 32 * MIB, False: 8 * MIB + 128 * 1024}
_WORKSPACE_THREADS = 2
# Cached blocks that fit nothing else: a share of what comes and goes, and a little beside it.
_SLACK_SHARE = 0.05
_SLACK = 64 * MIB

# Host memory of a process: interpreter and libraries, and with a GPU CUDA's host side. Where a probe has measured what
# a process takes before it loads anything, that and room for what it imports later; with a GPU also for the host side
# of kernels and communicators (0.28 to 0.37 GB grew after the probe on two H200 under torch 2.11).
PROCESS = int(1.0 * GIB)
PROCESS_WITH_GPU = int(2.0 * GIB)
LATER_IMPORTS, LATER_WITH_GPU = 64 * MIB, 320 * MIB
# A rank holds so much of a checkpoint at a time (wandistill.train.checkpoint).
CHECKPOINT_FILE = 512 * MIB
# Readers' pieces of a node: 4 threads, 2 MiB each and a page at either end (wandistill.teacher.record_reader).
_STAGING = 4 * (2 * MIB + 8192)
_BOUNCE_BLOCKS = 2

# Terms of a node that are gone when the student is exported.
_TEACHERS = (
    "teacher copy",
    "staging",
    "bounce buffers",
    "disk buffers",
    "teacher parts",
    "teacher activations",
    "teacher wide block",
)


@dataclass(frozen=True)
class NodeMemory:
    """One node."""

    host: Phases
    shm: int  # bytes of /dev/shm
    disk: int  # bytes of the checkpoints that are kept, and of the one being written


def rank_memory(
    request: PlanRequest,
    student: StudentMemory,
    placement: Placement,
    rank: int,
    places: DeviceMap | None,
    *,
    trains: bool,
) -> Phases:
    """The device of one rank.

    Args:
        student: of the request, see `student_memory`.
        rank: of the job for gpu0 and custom, else of its node.
        places: of a pipeline.
        trains: whether the rank has a student; gpu0's teacher rank may have none.
    """
    base = _base(request, placement, computes=places is None or any(place.rank == rank for place in places))
    teacher = weight_terms(request, placement, rank, places)
    online = [text_encoder(request)] if request.embeddings == "online" else []

    def phase(lasting: Sequence[Term], passing: Sequence[Term]) -> list[Term]:
        return [*lasting, *passing, *_slack(request, passing)]

    rollouts = forward_terms(request, placement, rank, places, rollout_rows(request), 1)
    phases = {
        "embeddings": phase([*base, text_encoder(request)], [encoding(request)]),
        "rollouts": phase([*base, *teacher, *online], rollouts),
    }
    if not request.trains:
        return Phases(phases)
    if compares(request) and trains:
        asked = comparing(request, placement, rank, places, _batch(request))
        phases["quantization"] = phase([*base, *teacher, *online], asked)
    cached = request.targets == "cached"
    if cached:  # the teacher leaves when the rollouts are there
        teacher = []
    accumulated = request.gradient_accumulation_steps
    asked = [] if cached else forward_terms(request, placement, rank, places, request.teacher_rows, accumulated)
    if not trains:
        return Phases({**phases, "teacher": phase([*base, *teacher], asked)})
    lasting = [*base, *teacher, *online, *student.always, _batches(request), *student.lasting_gradients]
    phases["teacher"] = phase(lasting, [*_gradients_before(request, placement, student), *asked])
    if SPECS[placement].side_stream and request.on_gpu:
        # What the side stream freed is kept for it, so the student cannot use it.
        left = states_under_way(request, placement, rank, places, request.teacher_rows) if places and asked else []
        pool = total(asked) - total(left)
        lasting += [*left, Term("side stream pool", pool, "memory that the teacher's stream keeps", allocated=False)]
    phases["student"] = phase(lasting, [_answers(request), *student.backward])
    phases["optimizer"] = phase(lasting, student.optimizer)
    if request.save_samples and rank == 0:
        phases["samples"] = phase(lasting, sampling(request))
    return Phases(phases)


def _base(request: PlanRequest, placement: Placement, *, computes: bool) -> list[Term]:
    gpu = request.machines.gpu
    if gpu is None:
        return []
    workspaces = cublas_workspaces(gpu, placement if computes else None)
    measured = request.machines.context
    terms = [
        Term("cuda context", CUDA_CONTEXT, "context and kernels", False)
        if measured is None
        else Term("cuda context", measured, "measured", False),
        Term("cublas workspaces", sum(workspaces), f"{len(workspaces)} x {format_bytes(workspaces[0])}"),
    ]
    if request.machines.world > 1:
        # The job's own communicator is there when the probe measures. That of a shared fetch counts wherever there may
        # be one: with more work auto takes none, and what fits would depend on that.
        split = placement is Placement.STREAM and may_split(request)
        groups = (SPECS[placement].side_stream or placement is Placement.SHARDED or split) + (measured is None)
        formula = f"{groups} communicators x {format_bytes(NCCL_COMMUNICATOR)}"
        terms.append(Term("nccl buffers", groups * NCCL_COMMUNICATOR, formula, allocated=False))
    return terms


def cublas_workspaces(gpu: Gpu, placement: Placement | None) -> list[int]:
    """Bytes of each workspace that cuBLAS takes on a rank; all else that a card changes is its speed.

    Args:
        placement: None where the rank computes nothing of the teacher.
    """
    beside = placement is not None and SPECS[placement].side_stream
    return [_WORKSPACE[gpu.capability >= (9, 0)]] * (_WORKSPACE_THREADS + beside)


def _slack(request: PlanRequest, passing: Sequence[Term]) -> list[Term]:
    """What torch's allocator keeps of tensors that came and went."""
    if not request.on_gpu:
        return []
    size = sum(term.size for term in passing if term.allocated)
    formula = f"{_SLACK_SHARE:.0%} of {format_bytes(size)} + {format_bytes(_SLACK)}"
    return [Term("allocator slack", int(_SLACK_SHARE * size) + _SLACK, formula, allocated=False)]


def _gradients_before(request: PlanRequest, placement: Placement, student: StudentMemory) -> Sequence[Term]:
    """Gradients that only last within a step, and are there while the teacher computes."""
    later = request.gradient_accumulation_steps > 1 and placement is Placement.GPU
    # A resident teacher answers each micro-batch in its turn; the others answer all of a step at its begin.
    return [term for term in student.backward if term.name == "student gradients"] if later else []


def _batches(request: PlanRequest) -> Term:
    """Inputs of this step and, until its figures are read, of the one before (wandistill.train.loop)."""
    one, count = _batch(request).size, 2 * request.gradient_accumulation_steps
    return Term("batches", count * one, f"{count} micro-batches x {format_bytes(one)}")


def _batch(request: PlanRequest) -> Term:
    """Inputs of one micro-batch: noisy latents, prompts and the empty prompt, in float32."""
    run = request.student_pass(request.batch_size).sizes
    return Term("batch", 4 * (run.latents + run.text + run.text // request.batch_size))


def _answers(request: PlanRequest) -> Term:
    """The teacher's velocities and features of all micro-batches, in float32."""
    run = request.student_pass(request.batch_size).sizes
    features = request.kept_features * request.batch_size * request.tokens * request.model.architecture.hidden_size
    one = 4 * (run.velocity + features)
    count = request.gradient_accumulation_steps
    return Term("teacher answers", count * one, f"{count} micro-batches x {format_bytes(one)}")


def node_memory(
    request: PlanRequest,
    student: StudentMemory,
    placement: Placement,
    devices: Sequence[Phases],
    places: DeviceMap | None,
) -> NodeMemory:
    """The memory of a node whose ranks' devices are `devices`; without GPUs they are this memory."""
    machines, spec, own = request.machines, SPECS[placement], records(request, placement)
    ranks, experts = machines.ranks, request.model.experts
    process = PROCESS_WITH_GPU if request.on_gpu else PROCESS
    if machines.process is not None:
        process = machines.process + (LATER_WITH_GPU if request.on_gpu else LATER_IMPORTS)
    always = [Term("processes", ranks * process, f"{ranks} x {format_bytes(process)}")]
    copied = 0
    if spec.host_copy:
        copied = experts * own.total
    elif spec.store is Store.DISK or (placement is Placement.GPU and own.wide):
        copied = experts * own.outer
    always.append(Term("teacher copy", copied, f"{experts} experts, shared by {ranks} ranks"))
    if copied:
        always.append(Term("staging", _STAGING, "readers' pieces"))
    if copied and request.share_dir:
        bounce = ranks * _BOUNCE_BLOCKS * own.block
        always.append(Term("bounce buffers", bounce, f"{ranks} ranks x {_BOUNCE_BLOCKS} x {format_bytes(own.block)}"))
    if placement is Placement.DISK:
        buffer = request.disk_buffer or DISK_BLOCKS * own.block
        always.append(Term("disk buffers", ranks * buffer, f"{ranks} ranks x {format_bytes(buffer)}"))
    always += stored_terms(request, placement, places)
    if request.ema_device == "cpu":
        always.append(
            Term("student average", ranks * student.bytes.average, f"{ranks} x {format_bytes(student.bytes.average)}")
        )
    if placement is Placement.CPU:
        rows, requests = request.teacher_rows, request.gradient_accumulation_steps
        one = total(_on_cores(request, rows, requests))
        always.append(Term("teacher activations", ranks * one, f"{ranks} ranks x {format_bytes(one)}"))
        always.append(Term("teacher wide block", ranks * own.wide, f"{ranks} ranks x {format_bytes(own.wide)}"))
    before = [term for term in always if term.name != "student average"]
    if not request.on_gpu:
        always.append(_tensors([device.peak for device in devices]))
    phases = {
        "training": always,
        "building": [*always, *_building(student)],
        "checkpoint": [*always, _checkpoint(request, student)],
        "export": [*(term for term in always if term.name not in _TEACHERS), _export(student)],
    }
    if not request.trains:
        del phases["export"], phases["checkpoint"], phases["building"]
    if loading := _loading(request, placement):
        phases["loading"] = [*before, *loading]
    if compares(request):
        phases["quantization"] = [*before, *comparing_on_node(request, placement)]
        if not request.on_gpu:
            held = [total(device.phases.get("quantization", ())) for device in devices]
            phases["quantization"].append(_tensors(held))
    kept = _state(request, student) * (machines.world if request.sharded_student else 1)
    return NodeMemory(
        Phases(phases), 0 if request.share_dir else copied, request.checkpoints * kept if request.trains else 0
    )


def _tensors(sizes: Sequence[int]) -> Term:
    """What ranks without a GPU hold in the node's memory."""
    return Term("ranks' tensors", sum(sizes), " + ".join(format_bytes(size) for size in sizes))


def _on_cores(request: PlanRequest, rows: int, requests: int) -> list[Term]:
    """The forward of placement cpu, which is stream's without slots."""
    return forward_terms(request.change_machines(gpu=None), Placement.STREAM, 0, None, rows, requests)


def _loading(request: PlanRequest, placement: Placement) -> list[Term]:
    """A resident teacher passes the memory of each rank on its way to the GPU."""
    own = records(request, placement)
    if placement is not Placement.GPU or not request.on_gpu:
        return []
    ranks, each = request.machines.ranks, 4 * own.largest
    if own.wide:
        size = ranks * _BOUNCE_BLOCKS * own.block
        return [Term("blocks as read", size, f"{ranks} ranks x {_BOUNCE_BLOCKS} x {format_bytes(own.block)}")]
    formula = f"{ranks} ranks x {format_bytes(each)}, one tensor at a time; the files are mapped"
    return [Term("tensor as loaded", ranks * each, formula)]


def _building(student: StudentMemory) -> list[Term]:
    """The student is built in float32 on the CPU of rank 0."""
    parameters = student.bytes.parameters
    return [Term("student as built", 4 * parameters, f"{parameters / 1e6:,.1f} M parameters x 4 B")]


def _state(request: PlanRequest, student: StudentMemory) -> int:
    """Bytes that a rank has of what a checkpoint holds."""
    average = student.bytes.average if request.ema_device != "none" else 0
    return student.bytes.weights + student.bytes.moments + average


def _checkpoint(request: PlanRequest, student: StudentMemory) -> Term:
    """Each rank holds one file of its part at a time; ranks with the same student share it out."""
    ranks, state = request.machines.ranks, _state(request, student)
    each = min(state if request.sharded_student else state // request.machines.world, CHECKPOINT_FILE)
    return Term("checkpoint's file", ranks * each, f"{ranks} ranks x {format_bytes(each)}")


def _export(student: StudentMemory) -> Term:
    """At the end rank 0 has the whole weights on the CPU."""
    size = 4 * student.bytes.parameters
    return Term("student as exported", size, f"{student.bytes.parameters / 1e6:,.1f} M parameters x 4 B")
