"""Measures one block of teacher and student where the run will compute it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import nn

from wandistill.models.forward import BlockState, run_block, run_blocks
from wandistill.models.student import Student
from wandistill.models.wan import WanFolder
from wandistill.models.weights import with_one_block
from wandistill.planner.activations import Pass
from wandistill.planner.measured import BlockProbe, BlockProbes, block_to_measure
from wandistill.planner.placements import AUTO, Placement
from wandistill.planner.request import PlanRequest
from wandistill.planner.teacher_memory import compute_bytes
from wandistill.planner.work import block_work
from wandistill.teacher import DTYPES, cpu
from wandistill.teacher.base import TeacherOutput
from wandistill.teacher.layout import Precision, TeacherLayout
from wandistill.teacher.resident import cpu_computes
from wandistill.teacher.widening import Widening
from wandistill.train.distributed import World
from wandistill.train.measuring import best_seconds, forget, mean_seconds, random_numbers, unless_full
from wandistill.train.norms import norms_in_float32
from wandistill.train.objectives import VelocityObjective
from wandistill.train.student import note_gradients
from wandistill.units import GIB, MIB

# A block's operations in all its passes, and weights, at most: a fraction of a second on the slowest device that is
# worth a run. On a CPU the operations are those of the first measurement; the second takes up to so many seconds,
# beside which waking threads and what else an operation costs is a small part.
_GPU_WORK, _GPU_WEIGHTS = 4e12, 4 * GIB
# A trained block's, by the bytes of an element: so many that the GPU takes longer than the host for its launches where
# the run's own block would; a card of 24 GB still takes half a second.
_TRAINED_WORK = {2: 1.6e13, 4: 8e12}
# A trained block is called for so many seconds: the host's time varies from call to call.
_TRAINED_SECONDS = 0.15
_CPU_WORK, _CPU_WEIGHTS, _CPU_SECONDS = 2.5e8, 256 * MIB, 0.2
_LONGEST_SIDE = 1024  # tokens that Wan's rotary tables have places for
# Of a pass, with the transformer's config, in a half precision, on a device.
Measure = Callable[[Pass, Mapping[str, Any], torch.dtype, torch.device], BlockProbe]
_FLOAT32 = set(WanTransformer3DModel._keep_in_fp32_modules)


def probe_blocks(request: PlanRequest, folder: WanFolder, world: World) -> BlockProbes:
    """One block of teacher and student, in the run's own shape as far as that does not take long, and what it takes to
    turn a stored block of the teacher to what is computed with.

    The student's is trained on a GPU, where launching the kernels of a small one takes longer than they do, and so is a
    student of that block, for what lies outside it; by the same kernels the memory that they take once they are loaded
    is there when it is measured. All ranks call this together, since on a CPU they share it.
    """
    world.barrier()
    config, device = folder.transformer_config, world.device
    fp16 = request.teacher_dtype == "float16"

    def teacher(placement: Placement, device: torch.device) -> BlockProbe | None:
        run = request.teacher_pass(request.teacher_piece, compute_bytes(request, placement))
        return _block(run, config, device, fp16=fp16)

    own = teacher(Placement.GPU, device)
    cores = None
    if request.placement in (Placement.CPU.value, AUTO):
        with cpu.share_of_cores(world.local_size):
            cores = teacher(Placement.CPU, torch.device("cpu"))
    student = outside = None
    if request.trains:
        run, fp16 = request.student_pass(request.batch_size), request.mixed_precision == "fp16"
        on_gpu = partial(_trained_block, again=request.gradient_checkpointing)
        student = _block(run, config, device, fp16=fp16, on_gpu=on_gpu)
        if student is not None and student.trained:
            outside = _outside(student, config, device, fp16=fp16)
    layout = TeacherLayout.of(folder.experts, config, Precision.of(DTYPES[request.teacher_dtype], device))
    return BlockProbes(own, student, cores, _widening(layout, device), outside)


@torch.no_grad()
def _widening(layout: TeacherLayout, device: torch.device) -> float | None:
    """Seconds to turn a block to what a GPU computes with; None where it is computed as it is stored."""
    if layout.wide is None or device.type != "cuda":
        return None

    def measure() -> float:
        stored = layout.block.views(torch.zeros(layout.block.size, dtype=torch.uint8, device=device))
        widening = Widening(layout, device)
        return best_seconds(lambda: widening.turn(stored), device, calls=4)

    seconds = unless_full(measure)
    forget(device)
    return seconds


def _block(
    run: Pass, config: Mapping[str, Any], device: torch.device, *, fp16: bool, on_gpu: Measure | None = None
) -> BlockProbe | None:
    """A block's forward, or on a GPU what `on_gpu` measures; None where there is no memory for it, or a CPU would
    emulate its precision."""
    half = torch.float16 if fp16 else torch.bfloat16
    measure: Measure = on_gpu or _gpu_block
    if device.type != "cuda":
        if run.compute.hidden == 2 and not cpu_computes(half):
            return None
        measure = _cpu_block
    found = unless_full(lambda: measure(run, config, half, device))
    forget(device)
    return found


def _gpu_block(run: Pass, config: Mapping[str, Any], half: torch.dtype, device: torch.device) -> BlockProbe:
    measured = block_to_measure(run, work=_GPU_WORK, weights=_GPU_WEIGHTS)
    block = _random_block(measured, config, half, device)
    return BlockProbe(measured, _block_seconds(block, measured, half, device, calls=4))


def _cpu_block(run: Pass, config: Mapping[str, Any], half: torch.dtype, device: torch.device) -> BlockProbe:
    """Of as many rows and tokens as take long enough to tell, by the speed of a few."""
    whole = block_to_measure(run, work=math.inf, weights=_CPU_WEIGHTS)
    block = _random_block(whole, config, half, device)
    few = block_to_measure(whole, work=_CPU_WORK, weights=_CPU_WEIGHTS)
    seconds = _block_seconds(block, few, half, device)
    done = block_work(few)
    work = (done.matrix_flops + done.attention_flops) * _CPU_SECONDS / seconds
    measured = block_to_measure(whole, work=max(work, _CPU_WORK), weights=_CPU_WEIGHTS)
    if measured == few:
        return BlockProbe(few, seconds)
    return BlockProbe(measured, _block_seconds(block, measured, half, device))


def _random_block(run: Pass, config: Mapping[str, Any], half: torch.dtype, device: torch.device) -> nn.Module:
    return _filled(with_one_block({**config, **run.architecture.to_config()}).blocks[0], run, half, device)


def _filled(module: nn.Module, run: Pass, half: torch.dtype, device: torch.device) -> nn.Module:
    """`module` with random weights in the precision of `run`, frozen."""
    for name, parameter in module.named_parameters():
        wide = run.compute.stored == 4 or not _FLOAT32.isdisjoint(name.split("."))
        values = random_numbers(tuple(parameter.shape), torch.float32 if wide else half, device)
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, nn.Parameter(values, requires_grad=False))
    module.requires_grad_(False).eval()
    norms_in_float32(module)
    return module


def _trained_block(
    run: Pass, config: Mapping[str, Any], half: torch.dtype, device: torch.device, *, again: bool
) -> BlockProbe:
    """A block's forward and backward, which computes the forward `again`."""
    work = _TRAINED_WORK[run.compute.hidden] / (4 if again else 3)
    measured = block_to_measure(run, work=work, weights=_GPU_WEIGHTS)
    block = _random_block(measured, config, half, device).requires_grad_(True)
    _count_gradients(block)
    state = _random_state(measured, half, device)
    # Of blocks before it, and of what lies outside the blocks, which are trained too.
    entering = (state.hidden, state.prompt, state.time_projection)
    for tensor in entering:
        tensor.requires_grad_(True)
    gradient = random_numbers(tuple(state.hidden.shape), state.hidden.dtype, device)

    def train() -> None:
        with torch.autocast(device.type, half, enabled=measured.compute.autocast):
            hidden = run_blocks([block], state, gradient_checkpointing=again)[0].hidden
        hidden.backward(gradient.to(hidden.dtype))
        for tensor in (*entering, *block.parameters()):
            tensor.grad = None

    return BlockProbe(measured, _trained_seconds(train, device), trained=True, again=again)


def _count_gradients(module: nn.Module) -> dict[int, int]:
    """Has the host do at each gradient what it does in a run of one rank, for the metrics; returns the bytes of the
    gradients that came, by their parameters' place."""
    gradients: dict[int, int] = {}
    note_gradients(((parameter, parameter.nbytes) for parameter in module.parameters()), gradients)
    return gradients


def _trained_seconds(train: Callable[[], None], device: torch.device) -> float:
    return mean_seconds(train, device, within=_TRAINED_SECONDS)


def _outside(block: BlockProbe, config: Mapping[str, Any], device: torch.device, *, fp16: bool) -> float | None:
    """Seconds of a micro-batch in which what lies outside the student's blocks is trained, with its loss: those of a
    student of one block without those of `block`. None where there is no memory for it."""
    half = torch.float16 if fp16 else torch.bfloat16
    seconds = unless_full(lambda: _student_seconds(block, config, half, device))
    forget(device)
    return max(seconds - block.seconds, 0.0) if seconds is not None else None


def _student_seconds(block: BlockProbe, config: Mapping[str, Any], half: torch.dtype, device: torch.device) -> float:
    """Of a micro-batch of a student of one block, in the shape of `block`, with the loss of its velocity alone."""
    run = block.run
    transformer = with_one_block({**config, **run.architecture.to_config()})
    _filled(transformer, run, half, device).requires_grad_(True)
    transformer.rope.to(device)
    student = Student(transformer, {}, expand_timesteps=run.per_token)
    student.gradient_checkpointing = block.again
    _count_gradients(student)
    size = (run.batch, run.architecture.in_channels, *_latents(run.tokens, run.architecture.patch_size))
    x = random_numbers(size, torch.float32, device)
    t = torch.full((run.batch,), 0.5, device=device)
    prompt = random_numbers((run.batch, run.prompt, run.architecture.text_dim), torch.float32, device)
    target = TeacherOutput(
        random_numbers((run.batch, run.architecture.out_channels, *size[2:]), torch.float32, device), {}
    )
    objective = VelocityObjective()

    def train() -> None:
        with torch.autocast(device.type, half, enabled=run.compute.autocast):
            velocity, features = student(x, t, prompt)
        objective(velocity, features, target).sum().backward()
        student.zero_grad()

    return _trained_seconds(train, device)


def _latents(tokens: int, patch: Sequence[int]) -> tuple[int, int, int]:
    """The size of a picture's latents of `tokens` tokens: as square as they allow, or of a few tokens fewer."""
    height = max(side for side in range(1, math.isqrt(tokens) + 1) if tokens % side == 0)
    if tokens // height > _LONGEST_SIDE:
        height = math.isqrt(tokens)
    return patch[0], patch[1] * height, patch[2] * (tokens // height)


@torch.no_grad()
def _block_seconds(block: nn.Module, run: Pass, half: torch.dtype, device: torch.device, calls: int = 1) -> float:
    state = _random_state(run, half, device)
    with torch.autocast(device.type, half, enabled=run.compute.autocast):
        return best_seconds(lambda: run_block(block, state), device, calls)


def _random_state(run: Pass, half: torch.dtype, device: torch.device) -> BlockState:
    """What enters a block."""
    architecture, compute = run.architecture, run.compute
    hidden = half if compute.hidden == 2 else torch.float32
    width, head = architecture.hidden_size, architecture.attention_head_dim
    times = (run.batch, run.tokens, 6, width) if run.per_token else (run.batch, 6, width)
    return BlockState(
        hidden=random_numbers((run.batch, run.tokens, width), hidden, device),
        prompt=random_numbers((run.batch, run.prompt, width), hidden, device),
        time_projection=random_numbers(times, hidden, device),
        rotary=(random_numbers((1, run.tokens, 1, head), torch.float32, device),) * 2,
        time_embedding=torch.empty(0),
        latent_shape=(1, 1, run.tokens),
    )
