"""What a run measures of a real GPU before it loads anything, and how near its plan then comes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import SHORT, flags

from wandistill.demo.captions import training_prompts
from wandistill.units import MIB

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with auto and a memory profile."""
    # What this process holds on the card would count as the run's: tests that use the card themselves come later.
    assert not torch.cuda.is_initialized()
    folder = tmp_path_factory.mktemp("placing")
    (folder / "prompts.txt").write_text("\n".join(training_prompts(32)))
    settings = {**SHORT, "device": "cuda", "data_path": folder / "prompts.txt", "output_dir": folder / "out"}
    command = [
        sys.executable,
        "-m",
        "wandistill",
        "train",
        *flags(settings, "--memory_profile", "--gradient_checkpointing"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "teacher: gpu (gpu fits" in result.stderr
    return folder / "out"


def test_the_probe_takes_at_most_5_seconds_and_measures_everything(out: Path) -> None:
    probe = json.loads((out / "run.json").read_text())["probe"]
    assert probe["seconds"] < 5
    gpu = probe["ranks"][0]["gpu"]
    assert 0 < gpu["free"] <= gpu["total"] == torch.cuda.mem_get_info()[1]
    assert all(gpu[name] > 1e9 for name in ("host_link", "memory", "half", "float32"))
    assert all(probe["ranks"][0][f"{side}_block"]["seconds"] > 0 for side in ("teacher", "student"))


def test_planned_and_measured_memory_are_within_the_floor_of_each_other(out: Path) -> None:
    (gpu,) = json.loads((out / "run.json").read_text())["memory"]["gpu"]
    for what in ("allocated", "process"):
        assert abs(gpu[f"predicted_{what}_bytes"] - gpu[f"measured_{what}_bytes"]) < 256 * MIB


def test_the_profile_has_every_phase_and_torch_s_snapshot(out: Path) -> None:
    (rank,) = json.loads((out / "memory_profile.json").read_text())["ranks"]
    measured = {entry["phase"]: entry["measured_bytes"] for entry in rank["phases"]}
    assert set(measured) == {"caches", "teacher", "student", "optimizer"} and all(measured.values())
    assert (out / "memory_snapshot-rank-0.pickle").stat().st_size > 0
