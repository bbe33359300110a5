"""What lies outside a Wan's blocks, on a tape: `wandistill.models.forward.embed` and `unembed`, and the loss."""

from __future__ import annotations

from wandistill.planner.tape import Compute, Sizes, Tape


def embed(tape: Tape, sizes: Sizes, compute: Compute, *, grad: bool) -> None:
    """Leaves the state `in`, `prompt`, `time`, `rotary`, and what backward needs."""
    e, half = compute.hidden, compute.hidden == 2
    tape.alloc("rotary", 4 * sizes.rotary)
    if half:
        tape.alloc("outer_latents", 2 * sizes.latents)
    tape.alloc("patches", e * sizes.state)
    tape.alloc("in", e * sizes.state)
    tape.free("patches")
    rows = sizes.modulation // sizes.architecture.hidden_size
    time = 2 if compute.autocast else 4  # the timestep's embedder is kept in float32
    tape.alloc("outer_time", 4 * rows * sizes.architecture.freq_dim)
    tape.alloc("outer_time", 2 * time * sizes.modulation)
    tape.alloc("time_embedding", compute.stored * sizes.modulation)
    tape.alloc(
        "outer_time", (compute.stored + (2 if compute.autocast and compute.stored == 4 else 0)) * sizes.modulation
    )
    tape.alloc("time_projection", 6 * e * sizes.modulation)
    if half:
        tape.alloc("outer_prompt", 2 * sizes.text)
    tape.alloc("outer_prompt", 2 * e * sizes.prompt)
    tape.alloc("prompt", e * sizes.prompt)
    if not grad:
        tape.free("outer_latents", "outer_time", "outer_prompt")


def unembed(tape: Tape, sizes: Sizes, compute: Compute, *, grad: bool) -> None:
    """From `out` to `velocity`."""
    state, e, half = sizes.state, compute.hidden, compute.hidden == 2
    tape.alloc("outer_modulation", 8 * sizes.modulation)
    if half:
        tape.alloc("outer_wide", 4 * state)
    tape.alloc("outer_norm", 4 * state)
    if not grad:
        tape.free("outer_wide")
    tape.alloc("outer_scale", 4 * sizes.modulation)
    tape.alloc("product", 4 * state)
    if not grad:
        tape.free("outer_norm")
    tape.alloc("sum", 4 * state)
    tape.free("product")
    if half:
        tape.alloc("outer_normed", 2 * state)
        tape.free("sum")
    else:
        tape.move("sum", "outer_normed")
    tape.alloc("patches", e * sizes.velocity)
    tape.alloc("velocity", e * sizes.velocity)
    tape.free("patches")
    if half or not grad:
        tape.free("out")
    if grad:
        tape.move("out", "outer_wide")
    else:
        tape.free("outer_normed", "outer_scale", "outer_modulation")


def loss(tape: Tape, sizes: Sizes, compute: Compute, features: int, teacher_width: int) -> None:
    """The objective in float32 and its gradient; each feature keeps its difference from the teacher's."""
    if compute.hidden == 2:
        tape.alloc("velocity", 4 * sizes.velocity)
    tape.alloc("loss", 8 * sizes.velocity)
    projected = sizes.rows * teacher_width
    tape.alloc("feature_loss", features * (4 if compute.autocast else compute.stored) * projected)
    tape.alloc("feature_loss", features * 4 * projected)


def unembed_backward(tape: Tape, sizes: Sizes, compute: Compute, *, fresh: bool) -> None:
    """From the gradient of the loss to `grad`, that of the last block's output."""
    state, half = sizes.state, compute.hidden == 2
    tape.alloc("grad_velocity", (4 + compute.hidden) * sizes.velocity)
    tape.free("loss")
    tape.alloc("grad", compute.hidden * state)
    tape.free("grad_velocity", "outer_normed")
    if fresh:
        patch = sizes.velocity // sizes.rows
        tape.alloc("gradients", compute.stored * patch * sizes.architecture.hidden_size)
    if half:
        tape.alloc("grad_wide", 4 * state)
        tape.free("grad")
    else:
        tape.move("grad", "grad_wide")
    tape.alloc("grad_scale", 4 * state)
    tape.alloc("grad_norm", 4 * state)
    if sizes.per_token:
        tape.move("grad_scale", "grad_outer_modulation")
        tape.move("grad_wide", "grad_outer_modulation")
    tape.free("grad_scale", "grad_wide", "outer_norm", "outer_scale")
    tape.alloc("grad_wide", 4 * state)
    tape.free("grad_norm", "outer_wide")
    if half:
        tape.alloc("grad", 2 * state)
        tape.free("grad_wide")
    else:
        tape.move("grad_wide", "grad")
    if sizes.per_token:  # chunks put together, then summed over the two for the embedding's gradient
        tape.alloc("grad_chunks", 8 * state)
        tape.free("grad_outer_modulation")
        tape.alloc("grad_time", 4 * state)
        if half:
            tape.alloc("grad_chunks", 2 * state)
            tape.shrink("grad_time", 2 * state)
    tape.free("outer_modulation", "grad_chunks")
