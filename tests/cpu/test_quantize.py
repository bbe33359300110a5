"""8-bit storage: rows with a scale, computed in bfloat16, the cost measured and bounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_setup import ENGINE, answers, asks, place, resident, same, setting

from wandistill.errors import ConfigError
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.models.wan_text import encode_prompts
from wandistill.teacher.base import Expert, Prompt, Request
from wandistill.teacher.quantize import check_quantization, dequantize_rows, quantization_error, quantize_rows
from wandistill.teacher.resident import ResidentTeacher, cpu_computes

EIGHT_BIT = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


@pytest.fixture(params=EIGHT_BIT)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return EIGHT_BIT[request.param]


def test_rows_come_back_within_half_a_step(dtype: torch.dtype) -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-3], [1], [30]] * 2)
    weight[3] = 0
    stored, scale = quantize_rows(weight, dtype)
    assert stored.dtype == dtype and scale.dtype == torch.float32 and scale.shape == (6,)
    back = torch.empty_like(weight)
    dequantize_rows(stored, scale, back)
    # int8 has 127 even steps to the largest of the row, float8 three bits after the leading one; bfloat16 rounds once.
    step = scale[:, None] if dtype == torch.int8 else weight.abs() / 8 + scale[:, None] / 512
    assert ((back - weight).abs() <= step / 2 + weight.abs() / 256).all()
    assert (back[3] == 0).all()
    assert torch.equal(back, back.bfloat16().float())
    narrow = torch.empty_like(weight, dtype=torch.bfloat16)
    dequantize_rows(stored, scale, narrow)
    assert torch.equal(narrow.float(), back)


def test_each_weight_is_rounded_once_to_the_bit(dtype: torch.dtype) -> None:
    weight = torch.randn(300, 700, generator=torch.Generator().manual_seed(1))
    stored, scale = quantize_rows(weight, dtype)
    exact = (stored.double() * scale.double()[:, None]).float().bfloat16()
    for out in (torch.empty(300, 700, dtype=torch.bfloat16), torch.empty(300, 700)):
        dequantize_rows(stored, scale, out)
        assert torch.equal(out.bfloat16(), (stored.float() * scale[:, None]).bfloat16())
        assert torch.equal(out, out.bfloat16().to(out.dtype))
        # The float32 product's own rounding moves hardly any weight.
        assert (out.bfloat16() == exact).float().mean() > 0.999


def reference(folder: WanFolder, of_dtype: torch.dtype) -> ResidentTeacher:
    """A bfloat16 teacher whose block weights went through 8 bits."""
    models = {}
    for expert in folder.experts:
        exact = dict(folder.load_transformer(expert, torch.float32, "cpu").named_parameters())
        model = folder.load_transformer(expert, torch.bfloat16, "cpu")
        for name, parameter in model.named_parameters():
            if name.startswith("blocks.") and parameter.ndim == 2:
                dequantize_rows(*quantize_rows(exact[name].detach(), of_dtype), parameter.data)
        # A CPU without kernels for bfloat16 computes in float32.
        models[expert] = model if cpu_computes(torch.bfloat16) else model.float()
    return ResidentTeacher(models, torch.device("cpu"), expand_timesteps=folder.expand_timesteps)


@pytest.mark.parametrize("kind", ["t2v-a14b", "ti2v-5b", "embedded"])
def test_every_placement_of_the_engine_computes_the_dequantized_weights(
    tiny_wan: Callable[[str], Path], kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = open_teacher(kind if kind == "embedded" else str(tiny_wan(kind)))
    of = setting(folder, tmp_path, dtype)
    requests = asks(folder, features=(1,))
    expected = answers(reference(folder, dtype), requests)
    for name in (*ENGINE, "gpu"):
        teacher = place(name, of)
        assert same(answers(teacher, requests), expected), name
        teacher.close()


def real_requests(folder: WanFolder) -> list[Request]:
    """Captions as the teacher was trained on them, and noise levels of each expert."""
    captions = ["a red circle on a gray background", "a blue square left of a green circle on a white background"]
    tokenizer, encoder = folder.load_tokenizer(), folder.load_text_encoder(torch.float32, "cpu")
    positive, _ = encode_prompts(folder, tokenizer, encoder, captions)
    negative, _ = encode_prompts(folder, tokenizer, encoder, [""])
    generator = torch.Generator().manual_seed(0)
    requests = []
    for expert, times in ((Expert.HIGH, [0.99, 0.9]), (Expert.LOW, [0.8, 0.4])):
        clean, noise = torch.randn(2, 2, *folder.latent_shape(64, 64), generator=generator)
        t = torch.tensor(times)
        x = torch.lerp(0.5 * clean, noise, t.view(-1, 1, 1, 1, 1))
        requests.append(Request(x, t, Prompt(positive, negative), expert, 4.0, ()))
    return requests


@pytest.mark.parametrize(("name", "most"), [("int8", 0.012), ("float8", 0.05)])
def test_the_embedded_teachers_targets_move_little(
    name: str, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a CPU with kernels for bfloat16 its own rounding would come on top.
    monkeypatch.setattr("wandistill.teacher.layout.cpu_computes", lambda dtype: dtype == torch.float32)
    folder = open_teacher("embedded")
    ours = place("cpu", setting(folder, tmp_path, EIGHT_BIT[name]))
    exact = resident(setting(folder, tmp_path, torch.bfloat16))
    errors = quantization_error(ours, exact, real_requests(folder))
    ours.close()
    assert set(errors) == {Expert.HIGH, Expert.LOW}
    assert all(1e-4 < error < most for error in errors.values()), errors
    check_quantization(errors, name)


def test_an_error_above_five_percent_is_refused_unless_allowed() -> None:
    errors = {Expert.HIGH: 0.01, Expert.LOW: 0.06}
    with pytest.raises(ConfigError, match=r"float8 moves the targets of expert transformer_2 by 6\.0%.*take int8"):
        check_quantization(errors, "float8")
    with pytest.raises(ConfigError, match="take bfloat16"):
        check_quantization(errors, "int8")
    with pytest.raises(ConfigError, match="transformer by nan%"):
        check_quantization({Expert.HIGH: float("nan")}, "int8")
    check_quantization(errors, "float8", allow=True)
