"""Transformers without weights, and a teacher's weights read tensor by tensor: 28 GB are never held to fill 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from safetensors import safe_open
from torch import Tensor

from wandistill.errors import ConfigError
from wandistill.models.wan_weights import component_tensors


class TransformerFiles:
    """The safetensors of one diffusers transformer folder, whole or in shards.

    Args:
        held: gives a tensor that lies in memory with the numbers of the files, or None; what it gives is not read.
    """

    def __init__(self, folder: Path, held: Callable[[str], Tensor | None] | None = None) -> None:
        self.folder = folder
        self._held = held
        self._stored = component_tensors(folder, "diffusion_pytorch_model")

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tensor `name` in `dtype`, on the CPU and the caller's own.

        Raises:
            ConfigError: the files hold no such tensor.
        """
        if name not in self._stored:
            raise ConfigError(
                f"{self.folder} holds no tensor {name}, which its config.json describes: config and weights are of "
                "different models."
            )
        held = self._held(name) if self._held is not None else None
        if held is not None:
            return held.to(dtype, copy=True)
        # Opened anew for each tensor: a mapping that stays open keeps every page that was read in memory.
        with safe_open(self._stored[name].file, framework="pt") as file:
            return file.get_tensor(name).to(dtype)


def read_mean(sources: Sequence[TransformerFiles], name: str) -> Tensor:
    """The mean of tensor `name` over `sources`, float32; of one source its exact bits."""
    total = sources[0].read(name)
    for source in sources[1:]:
        total = total + source.read(name)
    return total / len(sources) if len(sources) > 1 else total


def empty_transformer(config: Mapping[str, Any]) -> WanTransformer3DModel:
    """The model of a transformer's config.json, its parameters on the meta device and nothing drawn at random.

    Weights are put in with `load_state_dict(..., assign=True)`. The rotary tables are no weights, and real.
    """
    with torch.device("meta"):
        model = WanTransformer3DModel.from_config(dict(config))
    own = model.config
    model.rope = type(model.rope)(own.attention_head_dim, own.patch_size, own.rope_max_seq_len)
    return model


def with_one_block(config: Mapping[str, Any]) -> WanTransformer3DModel:
    """`empty_transformer` without its blocks but the first: all are alike, and the modules of one take 0.15 MB."""
    return empty_transformer({**config, "num_layers": 1})
