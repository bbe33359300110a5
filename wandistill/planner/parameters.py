"""The parameters of Wan's components as tensors and counts, from their configs alone.

Tensor by tensor where memory needs it (an optimizer's blocks, a shard's rows, the largest gradient), as a count
elsewhere. A test holds all of them equal to torch's own on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from wandistill.architecture import WanArchitecture


class ParameterTensor(NamedTuple):
    """One parameter of a `WanTransformer3DModel`."""

    name: str  # within its block, or within the model for those outside the blocks
    shape: tuple[int, ...]
    float32: bool  # kept in float32 whatever the model's dtype (diffusers' _keep_in_fp32_modules)

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def _linear(name: str, inputs: int, outputs: int, *, float32: bool = False) -> list[ParameterTensor]:
    return [
        ParameterTensor(f"{name}.weight", (outputs, inputs), float32),
        ParameterTensor(f"{name}.bias", (outputs,), float32),
    ]


@lru_cache(maxsize=64)
def block_tensors(architecture: WanArchitecture) -> tuple[ParameterTensor, ...]:
    """The parameters of one transformer block."""
    hidden, ffn = architecture.hidden_size, architecture.ffn_dim
    tensors = [ParameterTensor("scale_shift_table", (1, 6, hidden), True)]
    for attention in ("attn1", "attn2"):
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            tensors += _linear(f"{attention}.{name}", hidden, hidden)
        tensors += [ParameterTensor(f"{attention}.{name}.weight", (hidden,), False) for name in ("norm_q", "norm_k")]
    if architecture.cross_attn_norm:
        tensors += [ParameterTensor(f"norm2.{name}", (hidden,), True) for name in ("weight", "bias")]
    tensors += _linear("ffn.net.0.proj", hidden, ffn) + _linear("ffn.net.2", ffn, hidden)
    return tuple(tensors)


@lru_cache(maxsize=64)
def outer_tensors(architecture: WanArchitecture) -> tuple[ParameterTensor, ...]:
    """The parameters outside the blocks."""
    hidden = architecture.hidden_size
    patch = architecture.patch_size
    return (
        ParameterTensor("scale_shift_table", (1, 2, hidden), True),
        ParameterTensor("patch_embedding.weight", (hidden, architecture.in_channels, *patch), False),
        ParameterTensor("patch_embedding.bias", (hidden,), False),
        *_linear("condition_embedder.time_embedder.linear_1", architecture.freq_dim, hidden, float32=True),
        *_linear("condition_embedder.time_embedder.linear_2", hidden, hidden, float32=True),
        *_linear("condition_embedder.time_proj", hidden, 6 * hidden),
        *_linear("condition_embedder.text_embedder.linear_1", architecture.text_dim, hidden),
        *_linear("condition_embedder.text_embedder.linear_2", hidden, hidden),
        *_linear("proj_out", hidden, architecture.out_channels * math.prod(patch)),
    )


def projection_tensors(student: int, teacher: int, pairs: int) -> tuple[ParameterTensor, ...]:
    """The student's trained projections of `pairs` block features from its width to the teacher's; none if equal."""
    if student == teacher:
        return ()
    return tuple(t for index in range(pairs) for t in _linear(f"projections.{index}", student, teacher, float32=True))


def count(tensors: Sequence[ParameterTensor], *, float32: bool | None = None) -> int:
    """Elements of `tensors`; with `float32`, only of those that are kept in float32, or only of the others."""
    return sum(t.numel for t in tensors if float32 is None or t.float32 is float32)


@dataclass(frozen=True)
class TextEncoder:
    """The fields of a `UMT5EncoderModel` config that shape its weights."""

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_heads: int
    relative_attention_num_buckets: int = 32

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TextEncoder:
        """From a text encoder's config.json."""
        return cls(**{field.name: config[field.name] for field in fields(cls) if field.name in config})

    @cached_property
    def parameters(self) -> int:
        """All parameters, the tied embedding counted once."""
        attention = 4 * self.d_model * self.num_heads * self.d_kv
        position = self.relative_attention_num_buckets * self.num_heads  # UMT5 has one table a layer
        feed_forward = 3 * self.d_model * self.d_ff  # gated
        layer = attention + position + feed_forward + 2 * self.d_model
        return self.vocab_size * self.d_model + self.num_layers * layer + self.d_model


@dataclass(frozen=True)
class Vae:
    """The fields of an `AutoencoderKLWan` config that shape its weights and its latents."""

    base_dim: int = 96
    decoder_base_dim: int | None = None
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)  # diffusers' spelling
    is_residual: bool = False
    in_channels: int = 3
    out_channels: int = 3
    patch_size: int | None = None
    scale_factor_spatial: int = 8
    scale_factor_temporal: int = 4

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Vae:
        """From a VAE's config.json."""
        known = {field.name: config[field.name] for field in fields(cls) if field.name in config}
        for name in ("dim_mult", "temperal_downsample"):
            if name in known:
                known[name] = tuple(known[name])
        return cls(**known)

    @cached_property
    def parameters(self) -> int:
        """All parameters of encoder and decoder."""
        quantize = _convolution(2 * self.z_dim, 2 * self.z_dim, 1) + _convolution(self.z_dim, self.z_dim, 1)
        return self._encoder() + quantize + self._decoder()

    def _encoder(self) -> int:
        widths = [self.base_dim * multiple for multiple in (1, *self.dim_mult)]
        total = _convolution(self.in_channels, widths[0], 27)
        for index, (inputs, outputs) in enumerate(pairwise(widths)):
            total += _residual_chain(inputs, outputs, self.num_res_blocks)
            if index < len(self.dim_mult) - 1:
                temporal = _convolution(outputs, outputs, 3) if self.temperal_downsample[index] else 0
                total += _convolution(outputs, outputs, 9) + temporal
        return total + _middle(widths[-1]) + widths[-1] + _convolution(widths[-1], 2 * self.z_dim, 27)

    def _decoder(self) -> int:
        base = self.decoder_base_dim or self.base_dim
        widths = [base * multiple for multiple in (self.dim_mult[-1], *reversed(self.dim_mult))]
        upsample = tuple(reversed(self.temperal_downsample))
        total = _convolution(self.z_dim, widths[0], 27) + _middle(widths[0])
        for index, (inputs, outputs) in enumerate(pairwise(widths)):
            if index > 0 and not self.is_residual:
                inputs //= 2  # Wan 2.1's upsampling halves the channels
            total += _residual_chain(inputs, outputs, self.num_res_blocks + 1)
            if index < len(self.dim_mult) - 1:
                temporal = _convolution(outputs, 2 * outputs, 3) if upsample[index] else 0
                total += _convolution(outputs, outputs if self.is_residual else outputs // 2, 9) + temporal
        return total + widths[-1] + _convolution(widths[-1], self.out_channels, 27)


def _convolution(inputs: int, outputs: int, kernel: int) -> int:
    return inputs * outputs * kernel + outputs


def _residual(inputs: int, outputs: int) -> int:
    shortcut = _convolution(inputs, outputs, 1) if inputs != outputs else 0
    return inputs + _convolution(inputs, outputs, 27) + outputs + _convolution(outputs, outputs, 27) + shortcut


def _residual_chain(inputs: int, outputs: int, blocks: int) -> int:
    return _residual(inputs, outputs) + (blocks - 1) * _residual(outputs, outputs)


def _middle(width: int) -> int:
    attention = width + _convolution(width, 3 * width, 1) + _convolution(width, width, 1)
    return 2 * _residual(width, width) + attention
