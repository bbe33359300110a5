"""A folder of Wan2.2-T2V-A14B whose weight files are holes: every config, every size, and not a byte of weights.

What opens a teacher and plans with it finds all that it looks for; reading a weight would give zeros.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from wandistill.catalog import find_model

MODEL = find_model("wan2.2-t2v-a14b")


def build_sparse_a14b(folder: Path, *, weights: bool = True) -> Path:
    """Writes the folder and returns it; without `weights` the configs alone."""
    transformer = {"_class_name": "WanTransformer3DModel", **MODEL.architecture.to_config()}
    vae = {"_class_name": "AutoencoderKLWan", "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}
    configs: dict[str, dict[str, Any]] = {
        "model_index.json": {
            "_class_name": "WanPipeline",
            "boundary_ratio": 0.875,
            "scheduler": ["diffusers", "UniPCMultistepScheduler"],
            "text_encoder": ["transformers", "UMT5EncoderModel"],
            "tokenizer": ["transformers", "T5TokenizerFast"],
            "transformer": ["diffusers", "WanTransformer3DModel"],
            "transformer_2": ["diffusers", "WanTransformer3DModel"],
            "vae": ["diffusers", "AutoencoderKLWan"],
        },
        "scheduler/scheduler_config.json": {"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0},
        "text_encoder/config.json": {"model_type": "umt5", **dataclasses.asdict(MODEL.text_encoder)},
        "tokenizer/tokenizer_config.json": {"model_max_length": 512},
        "transformer/config.json": transformer,
        "transformer_2/config.json": transformer,
        "vae/config.json": vae,
    }
    for name, content in configs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    if weights:
        for component in ("transformer", "transformer_2", "vae"):
            _hole(folder / component / "diffusion_pytorch_model.safetensors", MODEL.architecture.parameters)
        _hole(folder / "text_encoder" / "model.safetensors", MODEL.text_encoder.parameters)
    return folder


def _hole(path: Path, parameters: int) -> None:
    """A safetensors file of one bfloat16 tensor that takes no room on the disk."""
    entry = {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 2 * parameters]}
    header = json.dumps({"all": entry}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * parameters)
