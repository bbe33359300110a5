"""Loading a teacher's components: dtypes, Wan's float32 modules, and that nothing can be trained by accident."""

from __future__ import annotations

import pytest
import torch

from wandistill.architecture import WanArchitecture
from wandistill.models.wan import open_teacher
from wandistill.teacher.base import Expert

# diffusers' WanTransformer3DModel._keep_in_fp32_modules, by part of a parameter's name.
FLOAT32_PARTS = {"time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
HALF = [torch.float16, torch.bfloat16]


def float32_parameters(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}


def kept_by_wan(model: torch.nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if FLOAT32_PARTS & set(name.split("."))}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", ["t2v-1.3b", "t2v-a14b", "ti2v-5b", "embedded"])
def test_what_wan_keeps_in_float32_is_float32_in_any_dtype(tiny_wan, kind, dtype, device):
    folder = open_teacher("embedded" if kind == "embedded" else str(tiny_wan(kind)))
    for expert in folder.experts:
        model = folder.load_transformer(expert, dtype, device)
        assert {parameter.device.type for parameter in model.parameters()} == {device}
        assert float32_parameters(model) == kept_by_wan(model) != set()
        assert {parameter.dtype for parameter in model.parameters()} == {dtype, torch.float32}
        assert model.dtype == dtype
        kept = sum(model.get_parameter(name).numel() for name in kept_by_wan(model))
        assert kept == WanArchitecture.from_config(model.config).float32_parameters


def test_a_model_that_was_cast_as_a_whole_would_be_seen(tiny_wan):
    model = open_teacher(str(tiny_wan("t2v-a14b"))).load_transformer(Expert.HIGH, torch.float32, "cpu")
    model.to(torch.bfloat16)
    assert float32_parameters(model) != kept_by_wan(model)


def test_moving_a_model_keeps_its_float32_modules(tiny_wan):
    model = open_teacher(str(tiny_wan("t2v-a14b"))).load_transformer(Expert.HIGH, torch.bfloat16, "cpu")
    assert float32_parameters(model.to("meta")) == kept_by_wan(model)


def test_the_embedded_teachers_float32_modules_are_stored_in_half_and_widened():
    from safetensors.torch import load_file

    folder = open_teacher("embedded")
    stored = load_file(folder.path / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    loaded = folder.load_transformer(Expert.HIGH, torch.float16, "cpu").state_dict()
    assert loaded["scale_shift_table"].dtype == torch.float32
    assert all(torch.equal(loaded[name].float(), tensor.float()) for name, tensor in stored.items())


def test_the_experts_are_the_folders_own(tiny_wan):
    folder = open_teacher(str(tiny_wan("t2v-a14b")))
    high, low = (folder.load_transformer(expert, torch.float32, "cpu").state_dict() for expert in folder.experts)
    assert not torch.equal(high["proj_out.weight"], low["proj_out.weight"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["t2v-14b", "ti2v-5b"])
def test_components_come_frozen_and_in_evaluation_mode(tiny_wan, kind, device):
    folder = open_teacher(str(tiny_wan(kind)))
    for model in (
        folder.load_transformer(Expert.HIGH, torch.bfloat16, device),
        folder.load_text_encoder(torch.bfloat16, device),
        folder.load_vae(device),
    ):
        assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {device}
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert folder.load_vae("cpu").dtype == torch.float32


def test_no_loading_bars_are_drawn_where_there_is_no_terminal(tiny_wan, capfd):
    from diffusers.utils import logging

    folder = open_teacher(str(tiny_wan("t2v-14b")))
    folder.load_transformer(Expert.HIGH, torch.float32, "cpu")
    folder.load_text_encoder(torch.float32, "cpu")
    assert "it/s]" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled()
