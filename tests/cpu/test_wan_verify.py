"""`wandistill verify`: equal folders pass, and a fault in wandistill's loading would be seen."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from wandistill.errors import ConfigError, ExitCode
from wandistill.models import verify as module
from wandistill.models.verify import verify
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.teacher.base import Expert

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args(arguments))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["t2v-1.3b", "t2v-14b", "t2v-a14b", "ti2v-5b", "embedded"])
def test_each_layout_equals_diffusers_to_the_bit(tiny_wan, kind, dtype, device):
    folder = open_teacher("embedded" if kind == "embedded" else str(tiny_wan(kind)))
    rows = verify(folder, dtype, device)
    assert [row["expert"] for row in rows] == [expert.value for expert in folder.experts]
    assert [(row["max_abs"], row["relative_l2"], row["ok"]) for row in rows] == [(0.0, 0.0, True)] * len(rows)
    assert [folder.expert_for(row["t"]) for row in rows] == list(folder.experts)


def test_the_error_of_each_expert_is_printed(tiny_wan, capsys):
    assert run("--teacher_path", str(tiny_wan("t2v-14b")), "--device", "cpu", "--teacher_dtype", "float32") == 0
    printed = capsys.readouterr().out
    assert "against diffusers' WanPipeline" in printed
    assert "note: boundary_ratio 0.875" in printed
    assert "relative L2 0  ok" in printed


def test_json_has_a_row_for_each_expert(tiny_wan, capsys):
    path = str(tiny_wan("t2v-a14b"))
    assert run("--teacher-path", path, "--device", "cpu", "--teacher-dtype", "bfloat16", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema"] == 1
    assert (result["teacher"], result["dtype"], result["device"], result["ok"]) == (path, "bfloat16", "cpu", True)
    assert [row["expert"] for row in result["experts"]] == ["transformer", "transformer_2"]


def break_float32_modules(model, expert):
    return model.to(torch.bfloat16)


def nudge_a_weight(model, expert):
    model.blocks[1].scale_shift_table += 1e-2
    return model


@pytest.mark.parametrize("fault", [break_float32_modules, nudge_a_weight])
def test_a_fault_in_the_weights_is_seen(tiny_wan, monkeypatch, capsys, fault):
    load = WanFolder.load_transformer
    monkeypatch.setattr(
        WanFolder, "load_transformer", lambda self, expert, *rest: fault(load(self, expert, *rest), expert)
    )
    status = run("--teacher_path", str(tiny_wan("t2v-a14b")), "--device", "cpu", "--teacher_dtype", "bfloat16")
    assert status == ExitCode.TRAINING_FAILED == 3
    assert "DIFFERS" in capsys.readouterr().out


def test_swapped_experts_are_seen(tiny_wan, monkeypatch):
    load = WanFolder.load_transformer
    swapped = {Expert.HIGH: Expert.LOW, Expert.LOW: Expert.HIGH}
    monkeypatch.setattr(WanFolder, "load_transformer", lambda self, expert, *rest: load(self, swapped[expert], *rest))
    rows = verify(open_teacher(str(tiny_wan("t2v-a14b"))), torch.float32, "cpu")
    assert [row["ok"] for row in rows] == [False, False]


def test_a_teacher_that_overflows_does_not_pass(tiny_wan, monkeypatch, capsys):
    load = WanFolder.load_transformer

    def overflowing(self, *arguments):
        model = load(self, *arguments)
        model.proj_out.weight.fill_(float("inf"))
        return model

    monkeypatch.setattr(WanFolder, "load_transformer", overflowing)
    arguments = ("--teacher_path", str(tiny_wan("t2v-14b")), "--device", "cpu", "--teacher_dtype", "float32")
    assert run(*arguments) == ExitCode.TRAINING_FAILED
    assert "relative L2 nan  DIFFERS" in capsys.readouterr().out
    assert run(*arguments, "--json") == ExitCode.TRAINING_FAILED
    (row,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["experts"]
    assert row["relative_l2"] is None and row["ok"] is False


def test_a_gpu_that_is_not_there_is_an_error(tiny_wan, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda needs a CUDA GPU"):
        run("--teacher_path", str(tiny_wan("t2v-14b")), "--device", "cuda")
