"""A real GPU whose memory runs out: the refusal beforehand, and the end, report and new placement of a run that began.

Another process takes the card's memory, as a neighbour would; on a machine with two GPUs that of the second alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runs import SHORT, flags, losses
from sparse_wan import build_sparse_a14b

from tests.gpu.measure_plan import random_teacher
from wandistill.demo.captions import training_prompts

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU"),
    pytest.mark.timeout(900),
]

RANKS = min(torch.cuda.device_count(), 2) if torch.cuda.is_available() else 0
# Ready once it has its context; then a line on stdin makes it take all but so many bytes of what was free.
NEIGHBOUR = """
import sys, torch
device, left = torch.device("cuda", int(sys.argv[1])), int(sys.argv[2])
torch.ones(1, device=device)
free, _ = torch.cuda.mem_get_info(device)
print("ready", flush=True)
sys.stdin.readline()
held = torch.empty(free - left, dtype=torch.uint8, device=device)
print("taken", flush=True)
sys.stdin.readline()
"""


class Neighbour:
    """Takes the last GPU's memory when it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._told("ready")

    def take(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._told("taken")

    def _told(self, word: str) -> None:
        assert self._process.stdout is not None and self._process.stdout.readline() == f"{word}\n"


@contextmanager
def neighbour(left: int) -> Iterator[Neighbour]:
    """One that is ready to leave `left` bytes."""
    command = [sys.executable, "-c", NEIGHBOUR, str(RANKS - 1), str(left)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Neighbour(process)
    finally:
        process.kill()
        process.wait()


def launch(settings: dict[str, Any], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "wandistill", "launch", f"--nproc={RANKS}", "--"]
    command += flags(settings, "--deterministic")
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def record(output: Path) -> dict[str, Any]:
    return json.loads((output / "run.json").read_text())


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A teacher of the shape of 1.3B and 2.8 GB, whose place makes the difference."""
    folder = tmp_path_factory.mktemp("oom")
    random_teacher(folder / "teacher", "wan2.1-t2v-1.3b", tiny=False)
    (folder / "prompts.txt").write_text("\n".join(training_prompts(16)))
    return {
        **SHORT,
        "device": "cuda",
        "teacher_path": folder / "teacher",
        "data_path": folder / "prompts.txt",
        "cache_dir": folder / "cache",
        "student_config": "quarter",
        "init": "random",
        "teacher_dtype": "bfloat16",
        "mixed_precision": "bf16",
        "resolution": "256x256",
        "rollout_steps": 1,
        "max_steps": 6,
        "checkpoint_interval": 3,
    }


@pytest.fixture(scope="module")
def straight(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an undisturbed run."""
    folder = tmp_path_factory.mktemp("straight")
    run = launch({**settings, "teacher_device_strategy": "gpu", "output_dir": folder / "out"}, folder / "log")
    assert run.wait(300) == 0, (folder / "log").read_text()[-3000:]
    return folder / "out"


def too_little(straight: Path) -> int:
    """Bytes of a GPU with which `gpu` does not fit, and what leaves the teacher's 2.8 GB elsewhere does."""
    return int(record(straight)["memory"]["gpu"][-1]["measured_process_bytes"]) - (5 << 28)


def short_of_memory(settings: dict[str, Any], left: int, folder: Path) -> tuple[int, float, str]:
    """A run whose last rank finds only `left` bytes once it has planned; its exit code, the seconds from then on to
    its end, and what it said."""
    output = Path(settings["output_dir"])
    with neighbour(left) as other:
        run = launch({**settings, "teacher_device_strategy": "gpu"}, folder / "log")
        while not (output / "run.json").exists() or "plan" not in record(output):
            assert run.poll() is None, (folder / "log").read_text()[-3000:]
            time.sleep(0.01)
        other.take()
        began = time.monotonic()
        code = run.wait(300)
        return code, time.monotonic() - began, (folder / "log").read_text()


def test_memory_that_runs_out_on_one_gpu_ends_all_ranks_with_one_report(
    settings: dict[str, Any], straight: Path, tmp_path: Path
) -> None:
    asked = {**settings, "output_dir": tmp_path / "out"}
    code, seconds, said = short_of_memory(asked, too_little(straight), tmp_path)
    assert code == 1, said[-3000:]
    assert seconds < 60
    report = json.loads((tmp_path / "out" / "oom.json").read_text())
    assert report["kind"] == "cuda" and report["rank"] == RANKS - 1
    assert said.count("OUT OF MEMORY") == 1 and f"rank {RANKS - 1}" in said
    assert [memory["rank"] for memory in report["ranks"]] == list(range(RANKS))


def test_replanning_finishes_the_run_with_the_losses_of_an_undisturbed_one(
    settings: dict[str, Any], straight: Path, tmp_path: Path
) -> None:
    asked = {**settings, "output_dir": tmp_path / "out", "on_oom": "replan"}
    code, _, said = short_of_memory(asked, too_little(straight), tmp_path)
    assert code == 0, said[-5000:]
    assert record(tmp_path / "out")["replans"]
    assert losses(tmp_path / "out") == pytest.approx(losses(straight), rel=1e-5)


def test_a_teacher_that_cannot_fit_is_refused_within_10_seconds_and_before_a_weight_is_read(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    teacher = build_sparse_a14b(tmp_path / "teacher")
    asked = {**settings, "teacher_path": teacher, "teacher_device_strategy": "gpu", "output_dir": tmp_path / "out"}
    with neighbour(24 << 30) as other:
        other.take()
        began = time.monotonic()
        command = [sys.executable, "-m", "wandistill", "train", *flags(asked)]
        on_that_card = {**os.environ, "CUDA_VISIBLE_DEVICES": str(RANKS - 1)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=on_that_card)
        seconds = time.monotonic() - began
    assert done.returncode == 2, done.stderr[-3000:]
    assert "--teacher_device_strategy gpu" in done.stderr and "would fit" in done.stderr
    assert seconds < 10, seconds
