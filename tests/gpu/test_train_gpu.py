"""Training on a real GPU: precision modes, optimizers, and a resume that repeats bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import SHORT, flags, losses, student_digest, wait_for

from wandistill.demo.captions import training_prompts

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("gpu")
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(training_prompts(64)))
    return {**SHORT, "device": "cuda", "data_path": prompts, "cache_dir": folder / "cache", "batch_size": 32}


def command(settings: dict[str, object], *more: str) -> list[str]:
    return [sys.executable, "-m", "wandistill", "train", *flags(settings, *more)]


def run(settings: dict[str, object], *more: str) -> list[float]:
    result = subprocess.run(command(settings, *more), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return losses(Path(str(settings["output_dir"])))


@pytest.mark.parametrize(
    "settings",
    [
        {"teacher_dtype": "bfloat16"},
        {"teacher_dtype": "float32", "teacher_device_strategy": "cpu"},
        {"mixed_precision": "bf16", "feature_weight": 0.1},
        {"mixed_precision": "fp16", "ema_decay": 0.9, "ema_device": "cpu"},
        {"optimizer": "adamw_bf16"},
        {"optimizer": "adamw8bit"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_loss_falls(settings, shared, tmp_path):
    curve = run({**shared, **settings, "output_dir": tmp_path / "out"})
    print(json.dumps({"settings": settings, "first": curve[0], "last": curve[-1]}))
    assert sum(curve[-5:]) < 0.9 * sum(curve[:5])
    line = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["gpu_peak_bytes"] > 0


def test_a_killed_deterministic_run_goes_on_to_the_same_student_bytes(shared, tmp_path):
    straight = {**shared, "output_dir": tmp_path / "straight", "max_steps": 200, "checkpoint_interval": 100}
    run(straight, "--deterministic")
    killed = {**straight, "output_dir": tmp_path / "killed"}
    process = subprocess.Popen(command(killed, "--deterministic"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(tmp_path / "killed" / "checkpoints" / "step-100", process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "killed" / "student").exists()
    assert run(killed, "--deterministic") == losses(tmp_path / "straight")
    assert student_digest(tmp_path / "killed") == student_digest(tmp_path / "straight")


def test_the_gpu_s_losses_are_the_cpu_s(shared, tmp_path):
    settings = {"teacher_dtype": "float32", "max_steps": 5, "checkpoint_interval": 5}
    on_gpu = run({**shared, **settings, "output_dir": tmp_path / "gpu"}, "--deterministic")
    on_cpu = run({**shared, **settings, "device": "cpu", "output_dir": tmp_path / "cpu"})
    # Float32 without TF32; the two devices sum in other orders, and AdamW amplifies that a little.
    assert on_gpu == pytest.approx(on_cpu, rel=1e-3)
