"""Peak memory of a teacher's forward and of a student's forward and backward, in bytes, weights not counted.

The tapes give one block; here are the passes around them: what `wandistill.models.forward.embed` and `unembed`
allocate, what all blocks keep for backward, and where in the pass the most is live. With new gradients that is
either the begin of backward, when all activations are there, or its end, when all gradients are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from wandistill.architecture import WanArchitecture
from wandistill.planner.parameters import ParameterTensor, block_tensors, count, outer_tensors
from wandistill.planner.tape import Compute, Sizes, Tape, block_forward
from wandistill.planner.tape_backward import block_backward
from wandistill.planner.tape_outer import embed, loss, unembed, unembed_backward
from wandistill.student_config import spaced_blocks


@dataclass(frozen=True)
class Pass:
    """The shape of one forward: what the tensors' sizes depend on."""

    architecture: WanArchitecture
    batch: int  # rows of the model's batch, both halves of guidance counted
    tokens: int
    prompt: int  # tokens of the padded prompt
    compute: Compute
    per_token: bool = False

    @cached_property
    def sizes(self) -> Sizes:
        """Elements of its tensors."""
        return Sizes(self.architecture, self.batch, self.tokens, self.prompt, per_token=self.per_token)


@dataclass(frozen=True)
class Peak:
    """The most that a pass holds at once, and what of it are gradients or half-precision copies of weights."""

    activations: int
    gradients: int = 0
    casts: int = 0
    largest: tuple[tuple[str, int], ...] = ()  # tensors at the peak, the largest first

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.gradients + self.casts


def _peak(tape: Tape) -> Peak:
    gradients, casts = tape.at_peak.get("gradients", 0), tape.at_peak.get("casts", 0)
    largest = sorted(tape.at_peak.items(), key=lambda item: -item[1])
    named = tuple(item for item in largest if item[0] not in ("gradients", "casts"))
    return Peak(tape.peak - gradients - casts, gradients, casts, named[:8])


@lru_cache(maxsize=4096)
def forward_peak(run: Pass, features: int = 0) -> Peak:
    """A forward without gradients that keeps the outputs of `features` evenly spaced blocks, the last among them."""
    sizes, compute, layers = run.sizes, run.compute, run.architecture.num_layers
    state = compute.hidden * sizes.state
    tape = Tape()
    embed(tape, sizes, compute, grad=False)
    if layers > 1:
        # The state that entered the first block is bound in the caller while the blocks run.
        tape.move("in", "first")
        tape.alloc("in", state)
    kept = spaced_blocks(features, layers) if features else ()
    before = sum(block < layers - 1 for block in kept)
    # The last block's input may be one of them.
    also = layers - 2 in kept
    tape.alloc("features", state * (before - also))
    block_forward(tape, sizes, compute, grad=False)
    if also:
        tape.move("in", "features")
    tape.free("in", "first")
    unembed(tape, sizes, compute, grad=False)
    return _peak(tape)


@lru_cache(maxsize=4096)
def block_peak(run: Pass) -> int:
    """One block without gradients, its state counted: what the engine holds that takes all requests through a block."""
    sizes, compute = run.sizes, run.compute
    tape = Tape()
    tape.alloc("states", state_bytes(run, run.batch) - compute.hidden * sizes.state)
    tape.alloc("in", compute.hidden * sizes.state)
    block_forward(tape, sizes, compute, grad=False)
    tape.free("in")
    unembed(tape, sizes, compute, grad=False)
    return tape.peak


def state_bytes(run: Pass, rows: int) -> int:
    """The state of `rows` rows between two blocks: hidden state, prompt, times, rotary table."""
    sizes, compute = run.sizes, run.compute
    a_row = compute.hidden * (sizes.state + sizes.prompt + 7 * sizes.modulation) // run.batch
    return rows * a_row + 4 * sizes.rotary


@lru_cache(maxsize=4096)
def training_peak(
    run: Pass,
    *,
    checkpointing: bool,
    fresh: bool,
    one_block: bool = False,
    features: int = 0,
    teacher_width: int = 0,
) -> Peak:
    """Forward, loss and backward of a student.

    Args:
        run: the shape; its batch is a micro-batch.
        checkpointing: blocks are recomputed in backward.
        fresh: gradients are new tensors, not added to or copied into buffers that exist.
        one_block: gradients of a block leave after its backward, as under FSDP; only one block's are counted.
        features: blocks whose outputs are compared with the teacher's.
        teacher_width: the teacher's hidden size, for these.
    """
    peaks = [_first_blocks(run, checkpointing, fresh, features, teacher_width, second=False)]
    if run.architecture.num_layers > 1:
        peaks.append(_first_blocks(run, checkpointing, fresh and not one_block, features, teacher_width, second=True))
        if fresh and not one_block:
            peaks.append(_last_blocks(run, checkpointing))
    return max(peaks, key=lambda peak: peak.total)


@dataclass(frozen=True)
class Casts:
    """Bytes of the weights' half-precision copies that autocast makes."""

    block: int  # of one block
    kept: int  # outside the blocks, until their backward
    passing: int  # outside the blocks, until autocast ends: their input has no gradient, so backward needs no weight


def weight_casts(run: Pass) -> Casts:
    """What autocast copies; norms and tables are not cast, and biases, not needed by backward, count as passing."""
    architecture, compute = run.architecture, run.compute
    if not compute.autocast:
        return Casts(0, 0, 0)
    hidden = architecture.hidden_size
    if compute.stored == 2:  # only the timestep's embedder is not in half precision yet
        return Casts(0, 2 * hidden * hidden, 2 * hidden * architecture.freq_dim)
    patch = architecture.patch_size[0] * architecture.patch_size[1] * architecture.patch_size[2]
    kept = hidden * (8 * hidden + patch * (architecture.in_channels + architecture.out_channels))
    return Casts(
        2 * _block_weights(architecture), 2 * kept, 2 * hidden * (architecture.freq_dim + architecture.text_dim)
    )


def saved_per_block(run: Pass, *, checkpointing: bool) -> int:
    """What one block keeps for its backward."""
    sizes, compute = run.sizes, run.compute
    if checkpointing:
        return compute.hidden * sizes.state
    return _saved_by_block(run)


@lru_cache(maxsize=4096)
def _saved_by_block(run: Pass) -> int:
    sizes, compute = run.sizes, run.compute
    tape = Tape()
    block_forward(tape, sizes, compute, grad=True)
    output = tape.live["out"] if compute.hidden == 2 else 0
    # In float32 the block's input is what its first norm saves, in place of its output here.
    return tape.total - output


def _first_blocks(
    run: Pass, checkpointing: bool, fresh: bool, features: int, teacher_width: int, *, second: bool
) -> Peak:
    """Forward through all blocks, loss, and backward through the last block, or through the `second` to last.

    By then the gradients of the prompt and, with a timestep per token, of the times are there, which all blocks add to.
    """
    sizes, compute = run.sizes, run.compute
    half, layers = compute.hidden == 2, run.architecture.num_layers
    state = compute.hidden * sizes.state
    saved = saved_per_block(run, checkpointing=checkpointing)
    casts = weight_casts(run)
    tape = Tape()
    tape.alloc("casts", casts.kept + casts.passing + layers * casts.block)
    embed(tape, sizes, compute, grad=True)
    if layers > 1:
        tape.move("in", "first")
        if checkpointing or not half:
            tape.shrink("first", state)  # counted among what the blocks keep
        tape.alloc("saved", (layers - 1) * saved)
        tape.alloc("in", state)
    if half and not checkpointing:
        # Elsewhere a kept output is the next block's saved input anyway.
        tape.alloc("features", state * min(features, layers - 1))
    block_forward(tape, sizes, compute, grad=not checkpointing)
    if half and not checkpointing:
        tape.free("in")
    unembed(tape, sizes, compute, grad=True)
    tape.free("first", *(() if checkpointing else ("time_projection",)))
    tape.shrink("casts", casts.passing + (layers * casts.block if checkpointing else 0))
    loss(tape, sizes, compute, features, teacher_width)
    unembed_backward(tape, sizes, compute, fresh=fresh)
    if second:
        tape.shrink("saved", saved)
        tape.shrink("casts", 0 if checkpointing else casts.block)
        tape.alloc("grad_prompt", compute.hidden * sizes.prompt)
        tape.alloc("grad_time", compute.hidden * 6 * sizes.state if sizes.per_token else 0)
        tape.alloc("gradients", _bytes(block_tensors(run.architecture), compute) if fresh else 0)
    _one_block_backward(tape, sizes, compute, casts, checkpointing, fresh=fresh)
    return _peak(tape)


def _last_blocks(run: Pass, checkpointing: bool) -> Peak:
    """Backward of the first block and of the embeddings, with the gradients of all other blocks there."""
    sizes, compute, architecture = run.sizes, run.compute, run.architecture
    half = compute.hidden == 2
    casts = weight_casts(run)
    tape = Tape()
    block = _bytes(block_tensors(architecture), compute)
    others = (architecture.num_layers - 1) * block
    tape.alloc("gradients", others)
    tape.alloc("casts", casts.kept + (0 if checkpointing else casts.block))
    embed(tape, sizes, compute, grad=True)
    if half and not checkpointing:
        tape.free("in")
    if not checkpointing:
        tape.free("time_projection")
        block_forward(tape, sizes, compute, grad=True)
        tape.free("out")
    tape.alloc("grad_prompt", compute.hidden * sizes.prompt)
    if sizes.per_token:
        tape.alloc("grad_time", compute.hidden * (6 + 1) * sizes.state)
    tape.peak = 0  # the forward is in the past: only what it left is live now
    tape.alloc("grad", compute.hidden * sizes.state)
    _one_block_backward(tape, sizes, compute, casts, checkpointing, fresh=True)
    tape.alloc("gradients", others + block - tape.live["gradients"])
    tape.free("casts")  # each as the gradient of its weight is there
    tape.alloc("gradients", _bytes(outer_tensors(architecture), compute))
    if compute.autocast:
        # Gradients come in half precision and are widened. The last large ones are those of the time projection (6 D x
        # D), before the time embedder's (D x D, in float32), or with half weights of the time embedder alone.
        square = architecture.hidden_size**2
        tape.alloc("grad_weight", 2 * square if compute.stored == 2 else (2 * 6 - 4) * square)
    return _peak(tape)


def _one_block_backward(
    tape: Tape, sizes: Sizes, compute: Compute, casts: Casts, checkpointing: bool, *, fresh: bool
) -> None:
    if compute.hidden == 2:
        tape.alloc("grad_wide", 4 * sizes.state)
        tape.free("grad")
    else:
        tape.move("grad", "grad_wide")
    if checkpointing:
        tape.alloc("casts", casts.block)
        block_forward(tape, sizes, compute, grad=True, recompute=True)
    block_backward(tape, sizes, compute, fresh=fresh)


def _block_weights(architecture: WanArchitecture) -> int:
    """Elements of a block's linear layers, which autocast casts."""
    return architecture.block_parameters - architecture.block_float32_parameters - 4 * architecture.hidden_size


def _bytes(tensors: Sequence[ParameterTensor], compute: Compute) -> int:
    return compute.stored * count(tensors, float32=False) + 4 * count(tensors, float32=True)
