"""Packing trained parts as a folder in diffusers' WanPipeline layout, float16."""

import json
from pathlib import Path

from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import UMT5EncoderModel

from wandistill.demo.recipe import Recipe
from wandistill.demo.tokenizer import build_tokenizer

_TOKENIZER_CLASS = "PreTrainedTokenizerFast"


def pack(
    folder: Path,
    recipe: Recipe,
    vae: AutoencoderKLWan,
    text_encoder: UMT5EncoderModel,
    high_noise: WanTransformer3DModel,
    low_noise: WanTransformer3DModel,
) -> None:
    """Writes `folder`; the modules are in float16 afterwards."""
    pipeline = WanPipeline(
        tokenizer=build_tokenizer(),
        text_encoder=text_encoder.half(),
        vae=vae.half(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=recipe.flow_shift),
        transformer=high_noise.half(),
        transformer_2=low_noise.half(),
        boundary_ratio=recipe.boundary_ratio,
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
    # transformers 5 writes its own new name for this class, which transformers 4 doesn't know; both know the old one.
    for file, change in (
        ("model_index.json", {"tokenizer": ["transformers", _TOKENIZER_CLASS]}),
        ("tokenizer/tokenizer_config.json", {"tokenizer_class": _TOKENIZER_CLASS}),
    ):
        content = json.loads((folder / file).read_text()) | change
        (folder / file).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    for weights in folder.rglob("*.safetensors"):
        weights.chmod(0o644)  # safetensors writes them for their owner alone; they are shipped to others


def weight_bytes(folder: Path) -> int:
    """Bytes of all safetensors files in `folder`."""
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
