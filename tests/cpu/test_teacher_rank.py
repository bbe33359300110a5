"""`--teacher_rank_trains no`: a rank that only computes the teacher changes nothing but who does the work."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from ranks import Ranks
from runs import SHORT, flags, here, losses, student_digest
from safetensors import safe_open

from wandistill.demo.captions import training_prompts
from wandistill.errors import ExitCode

SERVED = {"teacher_device_strategy": "gpu0", "teacher_rank_trains": "no"}
# Eight samples a step in each run, and two in the last step.
COMMON = {**SHORT, "max_steps": 0, "num_epochs": 3, "gradient_accumulation_steps": 2, "checkpoint_interval": 100}
STEPS = 3
RUNS: dict[str, tuple[int, dict[str, object]]] = {
    "two ordinary ranks": (2, {"batch_size": 2}),
    "the first of three serves": (3, {"batch_size": 2, "teacher_rank": 0, **SERVED}),
    "the last of three serves, sharded": (
        3,
        {"batch_size": 2, "teacher_rank": 2, "student_parallel": "fsdp", "ema_decay": 0.9, **SERVED},
    ),
    "one of two serves": (2, {"batch_size": 4, "teacher_rank": 0, **SERVED}),
}


def start(folder: Path, name: str, settings: dict[str, object], ranks: int) -> Ranks:
    # Its own latents: they are drawn with the teacher at its place.
    places = {"output_dir": folder / name, "cache_dir": folder / f"cache of {name}"}
    return Ranks(
        ranks,
        flags({**COMMON, **places, "data_path": folder / "prompts.txt", **settings}),
        folder / f"{name}.log",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher rank")
    (folder / "prompts.txt").write_text("\n".join(training_prompts(6)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> Path:
    """Where the first two runs are, each in the folder of its name."""
    for name in list(RUNS)[:2]:
        ranks, settings = RUNS[name]
        start(folder, name, settings, ranks).finish()
    return folder


def test_two_ranks_with_a_third_for_the_teacher_train_the_student_of_two_to_the_bit(runs: Path) -> None:
    expected = losses(runs / "two ordinary ranks")
    assert len(expected) == STEPS
    assert losses(runs / "the first of three serves") == pytest.approx(expected, abs=1e-5, rel=0)
    assert student_digest(runs / "the first of three serves") == student_digest(runs / "two ordinary ranks")


def test_the_first_rank_that_trains_writes_what_rank_0_would(runs: Path) -> None:
    for name in ("two ordinary ranks", "the first of three serves"):
        record = json.loads((runs / name / "run.json").read_text())
        assert (record["state"], record["identity"]["global_batch"]) == ("finished", 8)
        assert [path.name for path in (runs / name / "checkpoints").iterdir()] == [f"step-{STEPS}"]
        assert (runs / name / "report.html").is_file()
    assert "rank 0 only computes the teacher; 2 rank(s) train" in (runs / "the first of three serves.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RUNS)[2:])
def test_other_students_have_the_losses_too_and_are_exported_whole(runs: Path, name: str) -> None:
    def shapes(name: str) -> dict[str, list[int]]:
        (file,) = (runs / name / "student" / "transformer").glob("*.safetensors")
        with safe_open(file, "pt") as weights:
            return {key: weights.get_slice(key).get_shape() for key in weights.keys()}  # noqa: SIM118

    ranks, settings = RUNS[name]
    start(runs, name, settings, ranks).finish()
    assert losses(runs / name) == pytest.approx(losses(runs / "two ordinary ranks"), abs=1e-5, rel=0)
    assert shapes(name) == shapes("two ordinary ranks")


def test_a_signal_to_the_teachers_rank_alone_saves_and_ends_all_and_the_run_goes_on(runs: Path) -> None:
    ranks, settings = RUNS["the first of three serves"]
    world = start(runs, "stopped", settings, ranks)
    # While the others fill caches: so they see it in their first step, and stop when they read its figures.
    deadline = time.monotonic() + 240
    while not any(path.is_file() for path in (runs / "cache of stopped").rglob("*")):
        assert time.monotonic() < deadline, world.log.read_text()
        time.sleep(0.02)
    serving = world.processes[0].pid
    assert serving is not None
    os.kill(serving, signal.SIGTERM)
    assert world.wait() == [ExitCode.TERMINATED] * ranks, world.log.read_text()
    (saved,) = (runs / "stopped" / "checkpoints").iterdir()
    assert saved.name in ("step-1", "step-2")

    assert "continuing from" in start(runs, "stopped", settings, ranks).finish()
    assert losses(runs / "stopped") == losses(runs / "the first of three serves")
    assert student_digest(runs / "stopped") == student_digest(runs / "the first of three serves")
    written = (runs / "stopped" / "metrics.jsonl").stat().st_mtime_ns
    assert "this run is finished" in start(runs, "stopped", settings, ranks).finish()
    assert (runs / "stopped" / "metrics.jsonl").stat().st_mtime_ns == written


def test_bad_data_ends_the_teachers_rank_too(folder: Path) -> None:
    world = start(folder, "bad", {**SERVED, "data_path": folder / "nowhere.txt"}, 2)
    assert world.wait() == [ExitCode.BAD_CONFIG] * 2, world.log.read_text()
    assert "nowhere.txt" in world.log.read_text()


def test_with_one_rank_nobody_would_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**COMMON, **SERVED, "output_dir": folder / "alone", "data_path": folder / "prompts.txt"}
    assert here(["train", *flags(settings)]) == ExitCode.BAD_CONFIG
    assert "--teacher_rank_trains no: there is one rank" in capsys.readouterr().err
