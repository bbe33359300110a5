"""Starting real runs of `wandistill train` from tests: torchrun with any number of ranks, or in this process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from wandistill.cli import main

# A short run with the embedded teacher: 4 samples a step, whatever the ranks.
GLOBAL_BATCH = 4
SHORT = {
    "teacher_path": "embedded",
    "student_config": "half",
    "device": "cpu",
    "guidance_scale": "3",
    "rollout_steps": "4",
    "lr": "1e-3",
    "warmup_steps": "2",
    "max_steps": "20",
    "checkpoint_interval": "10",
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def flags(settings: dict[str, object], *more: str) -> list[str]:
    """Settings as flags of the command line."""
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))] + [
        "--no_save_samples",
        *more,
    ]


def torchrun(ranks: int, arguments: list[str]) -> subprocess.Popen[str]:
    """Starts `wandistill train` on `ranks` gloo ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return subprocess.Popen(
        [*command, "-m", "wandistill.train", *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 300) -> str:
    """Waits for the end and returns what was printed; anything but exit code 0 fails the test."""
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, output[-3000:]
    return output


def here(arguments: list[str]) -> int:
    """Runs a command of wandistill in this process; returns its exit code."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return main(arguments)


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 240) -> None:
    """Waits until `path` exists and holds something: a run opens metrics.jsonl before it heeds signals."""
    end = time.monotonic() + seconds
    while not path.exists() or not path.stat().st_size:
        assert process.poll() is None, f"the run ended before {path.name}: {process.communicate()[0][-3000:]}"
        assert time.monotonic() < end, f"{path} did not appear within {seconds} s"
        time.sleep(0.01)


def losses(output_dir: Path) -> list[float]:
    """The loss of every step."""
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def student_digest(output_dir: Path) -> str:
    """A digest of the exported student's weights."""
    files = sorted((output_dir / "student" / "transformer").glob("*.safetensors"))
    assert files
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
