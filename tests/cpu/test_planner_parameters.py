"""The planner's parameters are torch's own: every tensor of every catalogue model, on the meta device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from wandistill.architecture import WanArchitecture
from wandistill.catalog import Model, models
from wandistill.planner.parameters import TextEncoder, Vae, block_tensors, outer_tensors
from wandistill.student_config import student_spec

MODELS = models()
PUBLISHED = {
    "wan2.1-t2v-1.3b": 1_418_996_800,
    "wan2.1-t2v-14b": 14_288_491_584,
    "wan2.2-ti2v-5b": 4_999_787_712,
    "wan2.2-t2v-a14b": 28_576_983_168,
}


def transformer(architecture: WanArchitecture) -> WanTransformer3DModel:
    with torch.device("meta"):
        return WanTransformer3DModel(**architecture.to_config())


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_tensor_of_a_transformer_has_torch_s_name_shape_and_kind(model: Model) -> None:
    architecture = dataclasses.replace(model.architecture, num_layers=1)
    real = transformer(architecture)
    keep = real._keep_in_fp32_modules
    expected = {
        name: (tuple(parameter.shape), any(part in keep for part in name.split(".")))
        for name, parameter in real.named_parameters()
    }
    ours = {f"blocks.0.{t.name}": (t.shape, t.float32) for t in block_tensors(architecture)}
    ours |= {t.name: (t.shape, t.float32) for t in outer_tensors(architecture)}
    assert ours == expected


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_count_of_a_transformer_is_torch_s(model: Model) -> None:
    assert model.architecture.parameters == count(transformer(model.architecture))


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_the_count_of_a_model_is_the_published_one(name: str, parameters: int) -> None:
    assert MODELS[name].parameters == parameters


@pytest.mark.parametrize("student", ["half", "quarter", "1b"])
def test_the_count_of_a_named_student_is_torch_s(student: str) -> None:
    architecture = student_spec(student, MODELS["wan2.2-t2v-a14b"].architecture).architecture
    assert architecture.parameters == count(transformer(architecture))


@pytest.mark.parametrize("name", ["wan2.2-t2v-a14b", "embedded"])
def test_the_count_of_a_text_encoder_is_torch_s_with_the_tied_embedding_once(name: str) -> None:
    encoder: TextEncoder = MODELS[name].text_encoder
    with torch.device("meta"):
        real = UMT5EncoderModel(UMT5Config(**dataclasses.asdict(encoder), feed_forward_proj="gated-gelu"))
    # On the meta device `shared` and `encoder.embed_tokens` are not tied.
    embedding = encoder.vocab_size * encoder.d_model
    untied = sum(name.endswith(("shared.weight", "embed_tokens.weight")) for name, _ in real.named_parameters())
    assert encoder.parameters == count(real) - (untied - 1) * embedding


@pytest.mark.parametrize(
    ("name", "parameters"), [("wan2.2-t2v-a14b", 126_892_531), ("wan2.2-ti2v-5b", 704_688_668), ("embedded", None)]
)
def test_the_count_of_a_vae_is_torch_s(name: str, parameters: int | None) -> None:
    vae: Vae = MODELS[name].vae
    latents = {"latents_mean": [0.0] * vae.z_dim, "latents_std": [1.0] * vae.z_dim}
    config = {**dataclasses.asdict(vae), "dim_mult": list(vae.dim_mult)}
    config["temperal_downsample"] = list(vae.temperal_downsample)
    with torch.device("meta"):
        real = AutoencoderKLWan(**config, **latents)
    assert vae.parameters == count(real)
    assert parameters in (None, vae.parameters)


def test_the_text_encoder_of_wan_has_the_published_count() -> None:
    assert MODELS["wan2.1-t2v-14b"].text_encoder.parameters == 5_680_910_336
