"""Which tensors of a Wan block live when: a forward and a backward pass as a list of allocations.

Every line of diffusers' `WanTransformerBlock.forward` and `WanAttnProcessor` (0.42, named in the comments) allocates
and frees here what it does on a GPU with fused attention and fused RMS norm. `grad` says whether autograd records the
pass: then a tensor that its backward needs stays. Local variables of the Python frames count as long as they are
bound. A test traces the real block on torch's meta device and holds the peaks equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wandistill.architecture import WanArchitecture


@dataclass(frozen=True)
class Compute:
    """The precision of a pass."""

    stored: int  # bytes of a weight (the model's dtype, not that of the float32 parts)
    autocast: bool = False  # under torch.autocast to a half dtype
    flash: bool = True  # half precision runs flash or cuDNN attention, float32 the memory-efficient kernel

    @property
    def hidden(self) -> int:
        """Bytes of an element of the residual stream."""
        return 2 if self.autocast else self.stored

    @property
    def normed(self) -> int:
        """Bytes of an element of query and key after their RMS norm, which autocast runs in float32."""
        return 4 if self.autocast else self.stored


class Sizes:
    """Elements of the tensors of a pass, for the tape to multiply by bytes."""

    def __init__(
        self, architecture: WanArchitecture, batch: int, tokens: int, prompt: int, *, per_token: bool = False
    ) -> None:
        hidden = architecture.hidden_size
        self.architecture = architecture
        self.rows = batch * tokens
        self.state = self.rows * hidden  # U: the residual stream [B, N, D]
        self.ffn = self.rows * architecture.ffn_dim  # [B, N, ffn]
        self.prompt = batch * prompt * hidden  # embedded prompt [B, L, D]
        self.text = batch * prompt * architecture.text_dim  # prompt embeddings [B, L, E]
        patch = architecture.patch_size[0] * architecture.patch_size[1] * architecture.patch_size[2]
        self.latents = self.rows * patch * architecture.in_channels  # [B, C, F, H, W]
        self.velocity = self.rows * patch * architecture.out_channels
        self.rotary = 2 * tokens * architecture.attention_head_dim  # cosines and sines
        self.heads = self.rows * architecture.num_attention_heads  # log-sum-exp [B, heads, N]
        self.per_token = per_token  # a timestep per token (Wan2.2-TI2V-5B)
        self.modulation = self.state if per_token else batch * hidden  # one of scale, shift, gate
        self.square = hidden * hidden + hidden  # a projection's weight and bias
        self.wide = hidden * architecture.ffn_dim  # a feed-forward weight


class Tape:
    """Live bytes by name, and the most that were live at once."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.total = 0
        self.peak = 0
        self.at_peak: dict[str, int] = {}

    def alloc(self, name: str, size: int) -> None:
        """`size` more bytes under `name`."""
        self.live[name] = self.live.get(name, 0) + size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.live)

    def free(self, *names: str) -> None:
        """Everything under `names` is gone; names that are not live are skipped."""
        for name in names:
            self.total -= self.live.pop(name, 0)

    def move(self, old: str, new: str) -> None:
        """What is under `old` belongs to `new` from now on; nothing if nothing is."""
        size = self.live.pop(old, 0)
        if size:
            self.live[new] = self.live.get(new, 0) + size

    def shrink(self, name: str, size: int) -> None:
        """`size` bytes of `name` are gone, or as many as it has."""
        gone = min(size, self.live.get(name, 0))
        if gone:
            self.live[name] -= gone
            self.total -= gone


def block_forward(tape: Tape, sizes: Sizes, compute: Compute, *, grad: bool, recompute: bool = False) -> None:
    """One block; what it leaves on the tape is its output `out` and, with `grad`, what backward needs.

    With `recompute` it is the second run of a checkpointed block, which stops once the last tensor is saved, so that
    there is no output.
    """
    state, e, half = sizes.state, compute.hidden, compute.hidden == 2
    drop: Callable[..., None] = (lambda *names: None) if grad else tape.free
    # self.scale_shift_table + temb.float(), then chunk(6): views
    if half:
        tape.alloc("time", 24 * sizes.modulation)
    tape.alloc("modulation", 24 * sizes.modulation)
    tape.free("time")
    # 1. Self-attention: norm_hidden_states = (norm1(hidden.float()) * (1 + scale_msa) + shift_msa).type_as(hidden)
    _modulated_norm(tape, sizes, half, drop, "1")
    _attention(tape, sizes, compute, drop, "1", keys=state)
    # hidden_states = (hidden_states.float() + attn_output * gate_msa).type_as(hidden_states)
    if half:
        tape.alloc("wide", 4 * state)
    tape.alloc("gated", 4 * state)
    tape.alloc("sum", 4 * state)
    tape.free("wide", "gated")
    if half:
        tape.alloc("hidden1", 2 * state)
        tape.free("sum")
    else:
        tape.move("sum", "hidden1")
    # 2. Cross-attention: norm_hidden_states = norm2(hidden_states.float()).type_as(hidden_states)
    if half:
        tape.alloc("wide2", 4 * state)
    if sizes.architecture.cross_attn_norm:
        tape.alloc("norm2", 4 * state)
        tape.alloc("statistics2", 8 * sizes.rows)
        if half:
            drop("wide2")
            tape.alloc("normed2", 2 * state)
            tape.free("norm2")
        else:
            tape.move("norm2", "normed2")
        drop("statistics2")
    elif half:
        tape.alloc("normed2", 2 * state)
        tape.free("wide2")
    drop("normed1")
    _attention(tape, sizes, compute, drop, "2", keys=sizes.prompt)
    drop("attention1")
    # hidden_states = hidden_states + attn_output
    tape.alloc("hidden2", e * state)
    if half:
        tape.free("hidden1")
    drop("hidden1")
    # 3. Feed-forward: norm_hidden_states = (norm3(hidden.float()) * (1 + c_scale_msa) + c_shift_msa).type_as(hidden)
    _modulated_norm(tape, sizes, half, drop, "3")
    drop("normed2")
    tape.alloc("ffn_input", e * sizes.ffn)  # ff_output = self.ffn(norm_hidden_states)
    tape.alloc("ffn_active", e * sizes.ffn)
    drop("ffn_input")
    tape.alloc("ffn", e * state)
    drop("ffn_active")
    # hidden_states = (hidden_states.float() + ff_output.float() * c_gate_msa).type_as(hidden_states)
    if half:
        tape.alloc("wide", 4 * state)
        tape.alloc("ffn_wide", 4 * state)
    if recompute:
        tape.free("wide", "attention2", *(("hidden2", "ffn") if half else ()))
        return
    tape.alloc("gated", 4 * state)
    drop("ffn_wide")
    tape.alloc("sum", 4 * state)
    tape.free("wide", "gated")
    if half:
        tape.alloc("out", 2 * state)
        tape.free("sum", "hidden2", "ffn")
    else:
        tape.move("sum", "out")
    # the frame's locals
    tape.free("attention2")
    drop("hidden2", "ffn", "normed3", "modulation")


def _modulated_norm(tape: Tape, sizes: Sizes, half: bool, drop: Callable[..., None], index: str) -> None:
    """(norm(hidden.float()) * (1 + scale) + shift).type_as(hidden)"""
    state = sizes.state
    if half:
        tape.alloc(f"wide{index}", 4 * state)
    tape.alloc(f"norm{index}", 4 * state)
    tape.alloc(f"statistics{index}", 8 * sizes.rows)
    drop(f"wide{index}", f"statistics{index}")
    tape.alloc(f"scale{index}", 4 * sizes.modulation)
    tape.alloc("product", 4 * state)
    drop(f"norm{index}", f"scale{index}")
    tape.alloc("sum", 4 * state)
    tape.free("product")
    if half:
        tape.alloc(f"normed{index}", 2 * state)
        tape.free("sum")
    else:
        tape.move("sum", f"normed{index}")


def _attention(tape: Tape, sizes: Sizes, compute: Compute, drop: Callable[..., None], index: str, *, keys: int) -> None:
    """WanAttnProcessor.__call__; `keys` elements in each of key and value."""
    state, e, n = sizes.state, compute.hidden, compute.normed
    key_rows = sizes.rows * keys // state
    query, key, value = f"query{index}", f"key{index}", f"value{index}"
    tape.alloc(query, e * state)  # to_q, to_k, to_v
    tape.alloc(key, e * keys)
    tape.alloc(value, e * keys)
    for name, elements, rows in ((query, state, sizes.rows), (key, keys, key_rows)):  # norm_q, norm_k
        if compute.autocast:
            tape.alloc(f"{name}_wide", 4 * elements)
        tape.alloc(f"{name}_normed", n * elements)
        tape.alloc(f"{name}_statistics", 4 * rows)
        if compute.autocast:
            tape.free(name)
        drop(name, f"{name}_wide", f"{name}_statistics")
    rotated = index == "1"
    for name in (query, key) if rotated else ():  # apply_rotary_emb, in float32, half of the channels at a time
        tape.alloc(f"{name}_rotated", n * state)
        tape.alloc("rotating", 6 * state)
        tape.free("rotating", f"{name}_normed")
    final = "_rotated" if rotated else "_normed"
    if compute.autocast:  # scaled_dot_product_attention is cast back
        tape.alloc(f"{query}_half", 2 * state)
        tape.alloc(f"{key}_half", 2 * keys)
    context, attention = f"context{index}", f"attention{index}"
    tape.alloc(context, e * state)
    tape.alloc(f"logsumexp{index}", 4 * sizes.heads)
    if compute.autocast:  # hidden_states.type_as(query), then cast again for to_out
        tape.alloc("context_wide", 4 * state)
        drop(context)
        tape.alloc(f"{context}_half", 2 * state)
    tape.alloc(attention, e * state)  # to_out
    tape.free("context_wide")
    if compute.autocast:
        tape.free(query + final, key + final)
    drop(query + final, key + final, f"{query}_half", f"{key}_half", value)
    drop(context, f"{context}_half", f"logsumexp{index}")
