"""Tiny random teachers in the layout of each published Wan text-to-video model: same files, same config fields.

Sizes are tiny (about 0.3 M parameters), the keys are those that diffusers' conversion of each model has: shards and
index, scheduler, `transformer_2` absent, null or listed, boundary_ratio, expand_timesteps, VAE 2.1 or 2.2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS = ("a", "red", "blue", "circle", "square", "left", "of", "on", "gray", "background", "cat")


@dataclass(frozen=True)
class Layout:
    """What distinguishes one model's folder from another's."""

    transformer_2: str  # "absent" from model_index.json, "null" in it, or "listed"
    boundary_ratio: float | None = None
    expand_timesteps: bool = False
    vae: str = "2.1"
    flow_shift: float = 3.0
    sharded: bool = True


LAYOUTS = {
    "t2v-1.3b": Layout("absent", sharded=False),
    # As the converter writes Wan2.1 folders: one expert, and yet a boundary_ratio.
    "t2v-14b": Layout("null", boundary_ratio=0.875),
    "t2v-a14b": Layout("listed", boundary_ratio=0.875),
    "ti2v-5b": Layout("null", expand_timesteps=True, vae="2.2", flow_shift=5.0),
}

TRANSFORMER: dict[str, Any] = {
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 40,
    "text_dim": 16,
    "freq_dim": 16,
    "rope_max_seq_len": 64,
}


def build_tiny_wan(layout: Layout, folder: Path, seed: int = 0) -> Path:
    """Writes the folder of a tiny random teacher and returns it."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        channels = _save_vae(layout, folder / "vae")
        components = ["transformer"] + (["transformer_2"] if layout.transformer_2 == "listed" else [])
        for component in components:
            _save_transformer(layout, channels, folder / component)
        _save_text_encoder(layout, folder / "text_encoder")
    _save_tokenizer(folder / "tokenizer")
    _save_scheduler(layout, folder / "scheduler")
    _write(folder / "model_index.json", _model_index(layout))
    return folder


def _model_index(layout: Layout) -> dict[str, Any]:
    index: dict[str, Any] = {
        "_class_name": "WanPipeline",
        "_diffusers_version": "0.35.0.dev0",
        "boundary_ratio": layout.boundary_ratio,
        "expand_timesteps": layout.expand_timesteps,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if layout.transformer_2 == "null":
        index["transformer_2"] = [None, None]
    if layout.transformer_2 == "absent":
        # Wan2.1's folders are older than these fields.
        for key in ("transformer_2", "boundary_ratio", "expand_timesteps"):
            del index[key]
    return index


def _save_transformer(layout: Layout, channels: int, folder: Path) -> None:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(in_channels=channels, out_channels=channels, **TRANSFORMER)
    model.save_pretrained(folder, max_shard_size="60KB" if layout.sharded else "1GB")


def _save_vae(layout: Layout, folder: Path) -> int:
    """Saves the VAE; returns its latent channels."""
    from diffusers import AutoencoderKLWan

    if layout.vae == "2.1":
        vae = AutoencoderKLWan(base_dim=4, num_res_blocks=1)
    else:
        vae = AutoencoderKLWan(
            base_dim=4,
            decoder_base_dim=8,
            z_dim=48,
            num_res_blocks=1,
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_spatial=16,
            latents_mean=[(channel - 24) / 48 for channel in range(48)],
            latents_std=[(channel + 20) / 40 for channel in range(48)],
        )
    vae.save_pretrained(folder)
    return vae.config.z_dim


def _save_text_encoder(layout: Layout, folder: Path) -> None:
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    model = UMT5EncoderModel(config)
    model.save_pretrained(folder, max_shard_size="6KB" if layout.sharded else "1GB")


def _save_tokenizer(folder: Path) -> None:
    """A Unigram tokenizer as T5's: words of a small vocabulary whole, others letter by letter, `</s>` at the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    pieces += [(f"▁{word}", -2.0) for word in WORDS] + [(letter, -4.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_max_length": 512, "tokenizer_class": "T5Tokenizer", "extra_ids": 0}
    _write(
        folder / "tokenizer_config.json", {**config, "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    )


def _save_scheduler(layout: Layout, folder: Path) -> None:
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=layout.flow_shift
    )
    scheduler.save_pretrained(folder)


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2), encoding="utf-8")
