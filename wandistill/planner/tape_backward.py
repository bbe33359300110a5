"""The backward pass of a Wan block on a tape: gradients come, saved tensors go, in the order of autograd's engine.

Gradients of weights stay under `gradients` where they are new (`fresh`), and pass where they are added to a buffer
that exists already, as with DDP's buckets or from the second micro-batch on.
"""

from __future__ import annotations

from wandistill.planner.tape import Compute, Sizes, Tape


def block_backward(tape: Tape, sizes: Sizes, compute: Compute, *, fresh: bool) -> None:
    """From the gradient of the block's output, `grad_wide` (float32 already), to that of its input, `grad`.

    The tape holds what `block_forward(grad=True)` left, without its output.
    """
    state, e, half = sizes.state, compute.hidden, compute.hidden == 2
    # hidden = (hidden.float() + ffn.float() * gate).type_as(hidden)
    tape.alloc("grad_ffn", 4 * state)
    tape.alloc("grad_gate", 4 * state)
    _modulation_gradient(tape, sizes, "grad_gate")
    tape.free("ffn_wide", "ffn")
    if half:
        tape.alloc("grad_half", 2 * state)
        tape.free("grad_ffn")
        tape.move("grad_half", "grad_ffn")
    _residual(tape, state, half)
    # ffn.net.2, gelu, ffn.net.0
    _linear(tape, compute, "grad_ffn", ("ffn_active",), "grad_active", e * sizes.ffn, sizes.wide, fresh)
    tape.alloc("grad_input", e * sizes.ffn)
    tape.free("grad_active", "ffn_input")
    _linear(tape, compute, "grad_input", ("normed3",), "grad", e * state, sizes.wide, fresh)
    _modulated_norm(tape, sizes, half, "3", ("hidden2",))
    _add_residual(tape, e * state)
    # hidden = hidden + attn2(...): the residual keeps the same gradient
    tape.move("grad", "residual")
    _attention(tape, sizes, compute, "2", "residual", sizes.prompt, fresh=fresh, free_incoming=False)
    _norm2(tape, sizes, half)
    _add_residual(tape, e * state)
    # hidden = (hidden.float() + attn1 * gate).type_as(hidden)
    if half:
        tape.alloc("grad_wide", 4 * state)
        tape.free("grad")
    else:
        tape.move("grad", "grad_wide")
    tape.alloc("grad_attention", 4 * state)
    tape.alloc("grad_gate", 4 * state)
    if half:
        tape.alloc("grad_half", 2 * state)
        tape.free("grad_attention")
        tape.move("grad_half", "grad_attention")
    _modulation_gradient(tape, sizes, "grad_gate")
    tape.free("attention1", "modulation")
    _residual(tape, state, half)
    _attention(tape, sizes, compute, "1", "grad_attention", state, fresh=fresh, free_incoming=True)
    _modulated_norm(tape, sizes, half, "1", ("in",))
    _add_residual(tape, e * state)
    if sizes.per_token:  # the six gradients are put together, summed for the table, and added up for all blocks
        tape.alloc("grad_chunks", 24 * state)
        tape.free("grad_modulation")
        if half:
            tape.alloc("grad_chunks_half", 12 * state)
            tape.free("grad_chunks")
            tape.move("grad_chunks_half", "grad_chunks")
        if tape.live.get("grad_time", 0) < compute.hidden * 6 * state:
            tape.move("grad_chunks", "grad_time")
        tape.free("grad_chunks")


def _residual(tape: Tape, state: int, half: bool) -> None:
    """The gradient that goes around the branch, from `grad_wide` back to the residual stream's dtype."""
    if half:
        tape.alloc("residual", 2 * state)
        tape.free("grad_wide")
    else:
        tape.move("grad_wide", "residual")


def _add_residual(tape: Tape, size: int) -> None:
    tape.alloc("grad_total", size)
    tape.free("residual", "grad")
    tape.move("grad_total", "grad")


def _modulation_gradient(tape: Tape, sizes: Sizes, product: str) -> None:
    """The gradient of a scale or gate is summed over the tokens at once; with a timestep per token it stays."""
    if sizes.per_token:
        tape.move(product, "grad_modulation")
    tape.free(product)


def _linear(
    tape: Tape,
    compute: Compute,
    incoming: str,
    saved: tuple[str, ...],
    outgoing: str,
    size: int,
    weight: int,
    fresh: bool,
    *,
    free_incoming: bool = True,
) -> None:
    """Both gradients of a linear layer; then its saved input goes."""
    tape.alloc(outgoing, size)
    tape.alloc("grad_weight", compute.hidden * weight)
    if free_incoming:
        tape.free(incoming)
    tape.free(*saved)
    tape.shrink("casts", 2 * weight)
    if compute.autocast and compute.stored == 4:
        tape.alloc("grad_weight_wide", 4 * weight)
        tape.free("grad_weight")
        tape.move("grad_weight_wide", "grad_weight")
    if fresh:
        tape.move("grad_weight", "gradients")
    tape.free("grad_weight")


def _modulated_norm(tape: Tape, sizes: Sizes, half: bool, index: str, inputs: tuple[str, ...]) -> None:
    state = sizes.state
    if half:
        tape.alloc("grad_wide", 4 * state)
        tape.free("grad")
    else:
        tape.move("grad", "grad_wide")
    tape.alloc("grad_scale", 4 * state)
    tape.alloc("grad_norm", 4 * state)
    _modulation_gradient(tape, sizes, "grad_scale")
    if sizes.per_token:
        tape.move("grad_wide", "grad_modulation")  # the shift's gradient is the incoming one itself
    tape.free("grad_wide", f"norm{index}", f"scale{index}")
    _norm(tape, state, half, (f"wide{index}", f"statistics{index}", *(() if half else inputs)))


def _norm2(tape: Tape, sizes: Sizes, half: bool) -> None:
    state = sizes.state
    if half:
        tape.alloc("grad_norm", 4 * state)
        tape.free("grad")
    else:
        tape.move("grad", "grad_norm")
    if sizes.architecture.cross_attn_norm:
        _norm(tape, state, half, ("wide2", "statistics2", *(() if half else ("hidden1",))))
    elif half:
        tape.alloc("grad", 2 * state)
        tape.free("grad_norm")
    else:
        tape.move("grad_norm", "grad")


def _norm(tape: Tape, state: int, half: bool, saved: tuple[str, ...]) -> None:
    tape.alloc("grad_wide", 4 * state)
    tape.free("grad_norm", *saved)
    if half:
        tape.alloc("grad", 2 * state)
        tape.free("grad_wide")
    else:
        tape.move("grad_wide", "grad")


def _attention(
    tape: Tape,
    sizes: Sizes,
    compute: Compute,
    index: str,
    incoming: str,
    keys: int,
    *,
    fresh: bool,
    free_incoming: bool,
) -> None:
    """to_out, attention, rotary embedding, RMS norms and projections; `incoming` is the gradient of to_out's output."""
    state, e, n = sizes.state, compute.hidden, compute.normed
    query, key, value, context = f"query{index}", f"key{index}", f"value{index}", f"context{index}"
    saved = (f"{context}_half",) if compute.autocast else ()
    _linear(
        tape,
        compute,
        incoming,
        saved,
        "grad_context",
        e * state,
        sizes.square,
        fresh,
        free_incoming=free_incoming,
    )
    if compute.autocast:  # to float32 and back, as the forward pass went
        tape.alloc("grad_context_wide", 4 * state)
        tape.free("grad_context")
        tape.alloc("grad_context", 2 * state)
        tape.free("grad_context_wide")
    gradients = ((query, state), (key, keys), (value, keys))
    for name, elements in gradients:
        tape.alloc(f"grad_{name}", e * elements)
    if compute.flash:  # the kernel sums the query's gradient in float32, and holds a number per row and head
        tape.alloc("flash", 4 * state + 4 * sizes.heads)
        tape.free("flash")
    final = "_half" if compute.autocast else "_rotated" if index == "1" else "_normed"
    tape.free("grad_context", query + final, key + final, value, context, f"logsumexp{index}")
    if compute.autocast:
        for name, elements in ((key, keys), (query, state)):
            tape.alloc("grad_wide", 4 * elements)
            tape.free(f"grad_{name}")
            tape.move("grad_wide", f"grad_{name}")
    for _ in (key, query) if index == "1" else ():
        tape.alloc("rotating", (7 if n == 2 else 10) * state)
        tape.free("rotating")
    for name, elements in ((key, keys), (query, state)):
        tape.alloc("grad_normed", n * elements)
        tape.free(f"grad_{name}", name, f"{name}_wide", f"{name}_statistics")
        if compute.autocast:
            tape.alloc(f"grad_{name}", 2 * elements)
            tape.free("grad_normed")
        else:
            tape.move("grad_normed", f"grad_{name}")
    # to_v, to_k and to_q; in self-attention all three lead to the normed input, else key and value to the prompt
    normed = f"normed{index}"
    for name in (value, key):
        _linear(tape, compute, f"grad_{name}", (), f"grad_by_{name}", e * keys, sizes.square, fresh)
        if index == "2":
            total = "grad_prompt"
        elif name == value:
            tape.move(f"grad_by_{name}", "grad_by_keys")
            continue
        else:
            total = "grad_by_keys"
        tape.alloc("grad_sum", e * keys)
        tape.free(total, f"grad_by_{name}")
        tape.move("grad_sum", total)
    _linear(tape, compute, f"grad_{query}", (normed,), "grad", e * state, sizes.square, fresh)
    if index == "1":
        tape.alloc("grad_sum", e * state)
        tape.free("grad", "grad_by_keys")
        tape.move("grad_sum", "grad")
