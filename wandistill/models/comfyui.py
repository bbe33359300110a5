"""Wan's original tensor names, which ComfyUI reads: the inverse of diffusers' scripts/convert_wan_to_diffusers.py.

What ComfyUI looks for is in its comfy/model_detection.py (read at commit 0b61ce5; not run here): a prefix of
`model.diffusion_model.`, which it strips (`diffusion_model.` alone is that of LoRA files, and is not), a tensor
`head.modulation`, and shapes. Head size, freq_dim and text_dim it takes for granted, unless the file's metadata say.
"""

from __future__ import annotations

import json
import re

from wandistill.architecture import WanArchitecture

PREFIX = "model.diffusion_model."

# (diffusers, original), each for the whole name; \\1 is what the first group matched.
_RENAMES = tuple(
    (re.compile(f"^{pattern}$"), original)
    for pattern, original in (
        (r"patch_embedding\.(weight|bias)", r"patch_embedding.\1"),
        (r"condition_embedder\.time_embedder\.linear_1\.(weight|bias)", r"time_embedding.0.\1"),
        (r"condition_embedder\.time_embedder\.linear_2\.(weight|bias)", r"time_embedding.2.\1"),
        (r"condition_embedder\.time_proj\.(weight|bias)", r"time_projection.1.\1"),
        (r"condition_embedder\.text_embedder\.linear_1\.(weight|bias)", r"text_embedding.0.\1"),
        (r"condition_embedder\.text_embedder\.linear_2\.(weight|bias)", r"text_embedding.2.\1"),
        (r"proj_out\.(weight|bias)", r"head.head.\1"),
        (r"scale_shift_table", r"head.modulation"),
        (r"(blocks\.\d+)\.scale_shift_table", r"\1.modulation"),
        (r"(blocks\.\d+)\.attn1\.to_([qkv])\.(weight|bias)", r"\1.self_attn.\2.\3"),
        (r"(blocks\.\d+)\.attn1\.to_out\.0\.(weight|bias)", r"\1.self_attn.o.\2"),
        (r"(blocks\.\d+)\.attn1\.(norm_[qk])\.weight", r"\1.self_attn.\2.weight"),
        (r"(blocks\.\d+)\.attn2\.to_([qkv])\.(weight|bias)", r"\1.cross_attn.\2.\3"),
        (r"(blocks\.\d+)\.attn2\.to_out\.0\.(weight|bias)", r"\1.cross_attn.o.\2"),
        (r"(blocks\.\d+)\.attn2\.(norm_[qk])\.weight", r"\1.cross_attn.\2.weight"),
        # The original calls its norms 1, 3, 2 in this order; diffusers counts them as they come.
        (r"(blocks\.\d+)\.norm2\.(weight|bias)", r"\1.norm3.\2"),
        (r"(blocks\.\d+)\.ffn\.net\.0\.proj\.(weight|bias)", r"\1.ffn.0.\2"),
        (r"(blocks\.\d+)\.ffn\.net\.2\.(weight|bias)", r"\1.ffn.2.\2"),
    )
)


def original_name(name: str) -> str:
    """Wan's own name of the tensor that diffusers' `WanTransformer3DModel` calls `name`.

    Raises:
        KeyError: a text-to-video Wan has no such tensor.
    """
    for pattern, original in _RENAMES:
        if pattern.match(name):
            return pattern.sub(original, name)
    raise KeyError(f"{name} is not a tensor of a Wan text-to-video transformer")


def file_metadata(architecture: WanArchitecture) -> dict[str, str]:
    """The safetensors metadata that tell ComfyUI what it cannot see from the shapes."""
    transformer = {
        "num_heads": architecture.num_attention_heads,
        "freq_dim": architecture.freq_dim,
        "text_dim": architecture.text_dim,
    }
    return {"format": "pt", "config": json.dumps({"transformer": transformer})}
