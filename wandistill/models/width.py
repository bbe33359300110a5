"""Cutting a Wan's width: which heads and channels matter most, and the slices of every tensor that keep them.

A Wan transformer has these sets of channels, and every dimension of every tensor runs over one of them:

- residual: the stream from block to block, and the timestep embedding that modulates it; heads x head size of them.
- text, text_hidden, time_hidden: the embedded prompt, and the inner layers of the two embedders; as many.
- self, cross: the inner channels of a block's self- and cross-attention, kept or dropped by whole heads.
- ffn: the inner channels of a block's feed-forward.

The importance of a channel is its share of what the linear layers that read it give out: the mean square of its
activation times the squared norm of its weights (the score of Wanda, arXiv:2306.11695, summed over outputs). Each
layer's scores are normalised first, so that no layer outvotes the others where several read the same channels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from wandistill.architecture import WanArchitecture
from wandistill.models.forward import embed, run_block, unembed
from wandistill.models.weights import TransformerFiles, read_mean

_TIME, _TEXT = "condition_embedder.time_embedder", "condition_embedder.text_embedder"


class _Reading(NamedTuple):
    """Linear layers that read the same input, and the set of channels that it is."""

    channels: str
    layers: tuple[str, ...]  # the first one's input is measured


_OUTER_READINGS = (
    _Reading("residual", ("condition_embedder.time_proj",)),
    _Reading("residual", ("proj_out",)),
    _Reading("text_hidden", (f"{_TEXT}.linear_2",)),
    _Reading("time_hidden", (f"{_TIME}.linear_2",)),
)
_BLOCK_READINGS = (
    _Reading("residual", ("attn1.to_q", "attn1.to_k", "attn1.to_v")),
    _Reading("residual", ("attn2.to_q",)),
    _Reading("residual", ("ffn.net.0.proj",)),
    _Reading("text", ("attn2.to_k", "attn2.to_v")),
    _Reading("self", ("attn1.to_out.0",)),
    _Reading("cross", ("attn2.to_out.0",)),
    _Reading("ffn", ("ffn.net.2",)),
)

# The set of channels of each dimension of each tensor; "" is a dimension that stays whole, and "6residual" six copies
# of the residual channels one after the other.
_OUTER_DIMENSIONS = {
    "patch_embedding.weight": ("residual", "", "", "", ""),
    "patch_embedding.bias": ("residual",),
    f"{_TIME}.linear_1.weight": ("time_hidden", ""),
    f"{_TIME}.linear_1.bias": ("time_hidden",),
    f"{_TIME}.linear_2.weight": ("residual", "time_hidden"),
    f"{_TIME}.linear_2.bias": ("residual",),
    "condition_embedder.time_proj.weight": ("6residual", "residual"),
    "condition_embedder.time_proj.bias": ("6residual",),
    f"{_TEXT}.linear_1.weight": ("text_hidden", ""),
    f"{_TEXT}.linear_1.bias": ("text_hidden",),
    f"{_TEXT}.linear_2.weight": ("text", "text_hidden"),
    f"{_TEXT}.linear_2.bias": ("text",),
    "scale_shift_table": ("", "", "residual"),
    "proj_out.weight": ("", "residual"),
    "proj_out.bias": ("",),
}


def _attention(name: str, inner: str, read: str) -> dict[str, tuple[str, ...]]:
    dimensions: dict[str, tuple[str, ...]] = {}
    for layer, source in (("to_q", "residual"), ("to_k", read), ("to_v", read)):
        dimensions |= {f"{name}.{layer}.weight": (inner, source), f"{name}.{layer}.bias": (inner,)}
    dimensions |= {f"{name}.norm_q.weight": (inner,), f"{name}.norm_k.weight": (inner,)}
    return dimensions | {f"{name}.to_out.0.weight": ("residual", inner), f"{name}.to_out.0.bias": ("residual",)}


_BLOCK_DIMENSIONS = {
    **_attention("attn1", "self", "residual"),
    **_attention("attn2", "cross", "text"),
    "norm2.weight": ("residual",),
    "norm2.bias": ("residual",),
    "ffn.net.0.proj.weight": ("ffn", "residual"),
    "ffn.net.0.proj.bias": ("ffn",),
    "ffn.net.2.weight": ("residual", "ffn"),
    "ffn.net.2.bias": ("residual",),
    "scale_shift_table": ("", "", "residual"),
}
_PER_BLOCK = ("self", "cross", "ffn")
_BLOCK_NAME = re.compile(r"^blocks\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Importance:
    """The importance of every channel of a teacher; each vector sums to 1."""

    outer: Mapping[str, Tensor]  # residual, text, text_hidden, time_hidden -> [D]
    blocks: Mapping[int, Mapping[str, Tensor]]  # teacher block -> self [D], cross [D], ffn [F]

    def __add__(self, other: Importance) -> Importance:
        """The mean of two experts' importances, for blocks made of both."""

        def mean(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: (ours[name] + theirs[name]) / 2 for name in ours}

        blocks = {index: mean(ours, other.blocks[index]) for index, ours in self.blocks.items()}
        return Importance(mean(self.outer, other.outer), blocks)


@torch.no_grad()
def measure_importance(
    model: WanTransformer3DModel,
    batches: Iterable[tuple[Tensor, Tensor, Tensor]],
    blocks: Sequence[int],
    *,
    expand_timesteps: bool = False,
    read_block: Callable[[int], Mapping[str, Tensor]] | None = None,
) -> Importance:
    """The importance of a teacher's channels on real inputs.

    Args:
        model: the teacher, a `WanTransformer3DModel`.
        batches: a few of x [B, C, F, H, W], t [B] and prompt embeddings [B, L, E], where the model sees them; moved to
            its device. All pass a block together.
        blocks: the teacher blocks that the student is made of; the others have no vote.
        expand_timesteps: as in `forward`.
        read_block: gives the weights of a block, where those of `model` are empty: one block is in memory at a time.

    Raises:
        ValueError: there is no batch.
    """
    squares: dict[str, Tensor] = {}
    rows: dict[str, int] = {}
    norms: dict[str, Tensor] = {}
    readings = _readings(blocks)
    measured = {name for name, _ in readings}

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def measure(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            flat = inputs[0].detach().flatten(0, -2).float()
            total = flat.square().sum(0, dtype=torch.float64).cpu()
            squares[name] = squares[name] + total if name in squares else total
            rows[name] = rows.get(name, 0) + len(flat)

        return measure

    def weigh(prefix: str) -> None:
        layers = [layer for name, reading in readings if name.startswith(prefix) for layer in reading.layers]
        norms.update({layer: _norms(model.get_submodule(layer).weight) for layer in layers if layer not in norms})

    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in measured]
    device = model.patch_embedding.weight.device
    try:
        states = [
            embed(model, x.to(device), t.to(device), prompt.to(device), expand_timesteps=expand_timesteps)
            for x, t, prompt in batches
        ]
        for index, block in enumerate(model.blocks):
            if read_block is not None:
                block.load_state_dict(read_block(index), assign=True)
            states = [run_block(block, state) for state in states]
            weigh(f"blocks.{index}.")
            if read_block is not None:
                block.to("meta")
        for state in states:
            unembed(model, state)
    finally:
        for handle in handles:
            handle.remove()
    if not squares:
        raise ValueError("importance is measured on at least one batch")
    for reading in _OUTER_READINGS:
        weigh(reading.layers[0])
    means = {name: total / rows[name] for name, total in squares.items()}
    return _importance(norms.__getitem__, blocks, means)


def weight_importance(sources: Sequence[TransformerFiles], blocks: Sequence[int]) -> Importance:
    """The importance that the weights alone give, as if every activation had mean square 1; no teacher is loaded."""
    return _importance(lambda name: _norms(read_mean(sources, f"{name}.weight")), blocks, {})


class Cut:
    """The channels that a student keeps of its teacher, and their order."""

    def __init__(
        self,
        importance: Importance,
        student: WanArchitecture,
        teacher: WanArchitecture,
        blocks: Sequence[int],
    ) -> None:
        """Keeps as many of the most important channels as the student is wide, in the teacher's order."""
        whole_width = student.hidden_size == teacher.hidden_size
        size = teacher.attention_head_dim
        everything = torch.arange(teacher.hidden_size)
        self._outer = {
            name: everything if whole_width else _best(scores, student.hidden_size)
            for name, scores in importance.outer.items()
        }
        self._outer["6residual"] = torch.cat(
            [self._outer["residual"] + part * teacher.hidden_size for part in range(6)]
        )
        self._blocks = []
        for index in blocks:
            scores = importance.blocks[index]
            kept = {"ffn": _best(scores["ffn"], student.ffn_dim)}
            for name in ("self", "cross"):
                heads = _best(scores[name].unflatten(0, (-1, size)).sum(1), student.num_attention_heads)
                kept[name] = (heads.unsqueeze(1) * size + torch.arange(size)).flatten()
            self._blocks.append(kept)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """The part of the teacher's `tensor` that becomes the student's tensor `name`."""
        match = _BLOCK_NAME.match(name)
        dimensions = _BLOCK_DIMENSIONS[match.group(2)] if match else _OUTER_DIMENSIONS[name]
        kept = self._outer | (self._blocks[int(match.group(1))] if match else {})
        for dimension, channels in enumerate(dimensions):
            if channels and len(kept[channels]) != tensor.shape[dimension]:
                tensor = tensor.index_select(dimension, kept[channels])
        return tensor


def _readings(blocks: Sequence[int]) -> list[tuple[str, _Reading]]:
    """The layer whose input is measured, and its reading with full names, for all that are asked."""
    readings = list(_OUTER_READINGS)
    for index in blocks:
        for channels, layers in _BLOCK_READINGS:
            readings.append(_Reading(channels, tuple(f"blocks.{index}.{layer}" for layer in layers)))
    return [(reading.layers[0], reading) for reading in readings]


def _norms(weight: Tensor) -> Tensor:
    """The squared norm of what a layer does with each channel that it reads [in], on the CPU."""
    return weight.detach().float().square().sum(0).cpu()


def _importance(
    norms_of: Callable[[str], Tensor], blocks: Sequence[int], mean_squares: Mapping[str, Tensor]
) -> Importance:
    votes: dict[tuple[int | None, str], list[Tensor]] = {}
    for name, reading in _readings(blocks):
        norms = sum(norms_of(layer) for layer in reading.layers)
        assert isinstance(norms, Tensor)
        scores = norms.double() * mean_squares[name] if mean_squares else norms.double()
        match = _BLOCK_NAME.match(name)
        owner = int(match.group(1)) if match and reading.channels in _PER_BLOCK else None
        votes.setdefault((owner, reading.channels), []).append(scores / scores.sum().clamp_min(1e-300))
    mean = {key: torch.stack(scores).mean(0) for key, scores in votes.items()}
    outer = {channels: scores for (owner, channels), scores in mean.items() if owner is None}
    inner = {index: {channels: mean[index, channels] for channels in _PER_BLOCK} for index in blocks}
    return Importance(outer, inner)


def _best(scores: Tensor, count: int) -> Tensor:
    """The indices of the `count` highest scores, ascending; the earlier of equal ones wins."""
    return torch.sort(scores, descending=True, stable=True).indices[:count].sort().values
