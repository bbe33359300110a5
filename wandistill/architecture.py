"""The shape of a Wan transformer as numbers: what its config.json says, and what follows from it. No torch.

The parameter counts follow diffusers' `WanTransformer3DModel` (0.42) layer by layer; a test holds them equal to
torch's own count on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class WanArchitecture:
    """The fields of a `WanTransformer3DModel` config that shape its weights."""

    num_layers: int = 40
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    ffn_dim: int = 13824
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    patch_size: tuple[int, int, int] = (1, 2, 2)
    cross_attn_norm: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> WanArchitecture:
        """The architecture of a transformer's config.json; fields that do not shape the weights are ignored."""
        known = {name: config[name] for name in cls.__dataclass_fields__ if name in config}
        if "patch_size" in known:
            known["patch_size"] = tuple(known["patch_size"])
        if known.get("out_channels", 0) is None:
            known["out_channels"] = known.get("in_channels", cls.in_channels)
        return cls(**known)

    def to_config(self) -> dict[str, Any]:
        """Keyword arguments for `WanTransformer3DModel`."""
        return asdict(self)

    @property
    def hidden_size(self) -> int:
        """Channels of the residual stream: heads x head size (Wan has no other width)."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def block_float32_parameters(self) -> int:
        """Parameters of one block that Wan keeps in float32: its scale-shift table and the cross-attention's norm."""
        return 6 * self.hidden_size + (2 * self.hidden_size if self.cross_attn_norm else 0)

    @property
    def block_parameters(self) -> int:
        """Parameters of one transformer block, float32 ones included."""
        hidden, ffn = self.hidden_size, self.ffn_dim
        attention = 4 * (hidden * hidden + hidden) + 2 * hidden
        feed_forward = 2 * hidden * ffn + ffn + hidden
        return 2 * attention + feed_forward + self.block_float32_parameters

    @property
    def outer_float32_parameters(self) -> int:
        """Float32 parameters outside the blocks: the timestep embedder and the output's scale-shift table."""
        hidden = self.hidden_size
        return self.freq_dim * hidden + hidden + hidden * hidden + hidden + 2 * hidden

    @property
    def outer_parameters(self) -> int:
        """Parameters outside the blocks: patch, time and text embedding, output projection; float32 ones included."""
        hidden, patch = self.hidden_size, math.prod(self.patch_size)
        patch_embedding = self.in_channels * patch * hidden + hidden
        time_projection = hidden * 6 * hidden + 6 * hidden
        text_embedding = self.text_dim * hidden + hidden + hidden * hidden + hidden
        output = hidden * self.out_channels * patch + self.out_channels * patch
        return patch_embedding + time_projection + text_embedding + output + self.outer_float32_parameters

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.num_layers * self.block_parameters + self.outer_parameters

    @property
    def float32_parameters(self) -> int:
        """Parameters that Wan keeps in float32 whatever the dtype (diffusers' `_keep_in_fp32_modules`)."""
        return self.num_layers * self.block_float32_parameters + self.outer_float32_parameters

    def tokens(self, latent_shape: tuple[int, int, int]) -> int:
        """Tokens of a latent of `latent_shape` (frames, height, width)."""
        return math.prod(size // patch for size, patch in zip(latent_shape, self.patch_size, strict=True))
