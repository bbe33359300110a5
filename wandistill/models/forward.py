"""One Wan forward pass in its three parts, so that blocks may come from anywhere.

Every placement of the teacher, and the student, computes with these functions: `embed`, then `run_block` for each
block, then `unembed`. The arithmetic is that of diffusers' `WanTransformer3DModel.forward` (0.42), operation by
operation, which a test holds to the bit.

Shape names: B batch, C latent channels, F frames, H height, W width (all in latent units), N tokens, D hidden size,
L prompt tokens, E prompt embedding size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel


@dataclass(frozen=True)
class BlockState:
    """What travels from block to block, and what stays the same for all of them."""

    hidden: Tensor  # [B, N, D]
    prompt: Tensor  # [B, L, D], embedded
    time_projection: Tensor  # [B, 6, D], or [B, N, 6, D] with a timestep per token
    rotary: tuple[Tensor, Tensor]  # cos and sin, each [1, N, 1, head size]
    time_embedding: Tensor  # [B, D], or [B, N, D] with a timestep per token
    latent_shape: tuple[int, int, int]  # F, H, W


def embed(
    model: WanTransformer3DModel, x: Tensor, t: Tensor, prompt: Tensor, *, expand_timesteps: bool = False
) -> BlockState:
    """The state that enters the first block.

    Args:
        model: only what lies outside its blocks is used.
        x: noisy latents [B, C, F, H, W].
        t: times in 0..1, one per sample [B]; the model is given 1000 t.
        prompt: prompt embeddings [B, L, E], zero after the prompt's end.
        expand_timesteps: one timestep per token, as Wan2.2-TI2V-5B has it.
    """
    dtype = model.patch_embedding.weight.dtype
    frames, height, width = x.shape[2:]
    rotary = model.rope(x)
    hidden = model.patch_embedding(x.to(dtype)).flatten(2).transpose(1, 2).contiguous()
    timestep = t.float() * 1000.0
    tokens = hidden.shape[1] if expand_timesteps else None
    if tokens is not None:
        timestep = timestep.unsqueeze(1).expand(-1, tokens).flatten()
    time_embedding, time_projection, prompt, _ = model.condition_embedder(
        timestep, prompt.to(dtype), None, timestep_seq_len=tokens
    )
    time_projection = time_projection.unflatten(1 if tokens is None else 2, (6, -1))
    return BlockState(hidden, prompt, time_projection, rotary, time_embedding, (frames, height, width))


def run_block(block: nn.Module, state: BlockState) -> BlockState:
    """The state after one `WanTransformerBlock`."""
    return replace(state, hidden=block(state.hidden, state.prompt, state.time_projection, state.rotary))


def unembed(model: WanTransformer3DModel, state: BlockState) -> Tensor:
    """The predicted velocity [B, C, F, H, W] from the state after the last block."""
    hidden, time_embedding = state.hidden, state.time_embedding
    if time_embedding.ndim == 3:
        shift, scale = (model.scale_shift_table.unsqueeze(0) + time_embedding.unsqueeze(2)).chunk(2, dim=2)
        shift, scale = shift.squeeze(2), scale.squeeze(2)
    else:
        shift, scale = (model.scale_shift_table + time_embedding.unsqueeze(1)).chunk(2, dim=1)
    hidden = (model.norm_out(hidden.float()) * (1 + scale) + shift).type_as(hidden)
    patches = model.proj_out(hidden)
    frames, height, width = state.latent_shape
    p_t, p_h, p_w = model.config.patch_size
    grid = patches.reshape(len(hidden), frames // p_t, height // p_h, width // p_w, p_t, p_h, p_w, -1)
    return grid.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def run_blocks(
    blocks: Iterable[nn.Module],
    state: BlockState,
    features: Sequence[int] = (),
    *,
    gradient_checkpointing: bool = False,
) -> tuple[BlockState, dict[int, Tensor]]:
    """Runs all blocks; also returns the hidden state [B, N, D] after each block whose index is in `features`."""
    kept: dict[int, Tensor] = {}
    for index, block in enumerate(blocks):
        if gradient_checkpointing and torch.is_grad_enabled():
            hidden = checkpoint(
                block, state.hidden, state.prompt, state.time_projection, state.rotary, use_reentrant=False
            )
            state = replace(state, hidden=hidden)
        else:
            state = run_block(block, state)
        if index in features:
            kept[index] = state.hidden
    return state, kept


def forward(
    model: WanTransformer3DModel,
    x: Tensor,
    t: Tensor,
    prompt: Tensor,
    features: Sequence[int] = (),
    *,
    expand_timesteps: bool = False,
    gradient_checkpointing: bool = False,
) -> tuple[Tensor, dict[int, Tensor]]:
    """The velocity [B, C, F, H, W] and the features asked for, of a model whose blocks are all at hand."""
    state = embed(model, x, t, prompt, expand_timesteps=expand_timesteps)
    state, kept = run_blocks(model.blocks, state, features, gradient_checkpointing=gradient_checkpointing)
    return unembed(model, state), kept
