"""One rank, from flags to files: what a run does, writes, refuses and survives."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from runs import SHORT, finish, flags, here, losses, student_digest, torchrun, wait_for

from wandistill.demo.captions import training_prompts
from wandistill.errors import ExitCode
from wandistill.launch import lock
from wandistill.teacher.resident import ResidentTeacher

Train = Callable[..., int]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Data and caches that all runs of this file share, and two steps to go."""
    folder = tmp_path_factory.mktemp("run")
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(training_prompts(10)))
    return {**SHORT, "data_path": prompts, "cache_dir": folder / "cache", "max_steps": 2, "batch_size": 2}


@pytest.fixture
def train(shared: dict[str, object], tmp_path: Path) -> Train:
    """Trains in this process with the shared settings and others; into tmp_path/out unless told otherwise."""

    def call(*more: str, **settings: object) -> int:
        return here(["train", *flags({**shared, "output_dir": tmp_path / "out", **settings}, *more)])

    return call


def test_a_run_leaves_everything_that_it_promises(train, tmp_path):
    assert train("--save_samples", sample_interval=1, sample_steps=2, report_to="tensorboard") == 0
    out = tmp_path / "out"
    run = json.loads((out / "run.json").read_text())
    assert (run["schema"], run["state"], run["steps"]) == (1, "finished", 2)
    assert run["config"]["flow_shift"] == 3.0 and run["config"]["teacher_dtype"] == "float32"
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    promised = "schema step loss lr teacher_seconds student_seconds step_seconds gpu_peak_bytes host_rss_bytes"
    assert set(promised.split()) <= set(line)
    assert line["host_rss_bytes"] > 2**27
    assert {path.name for path in (out / "samples").iterdir()} == {"step-1", "step-2"}
    assert len(list((out / "samples" / "step-2").glob("*.png"))) == 8
    assert (out / "report.html").is_file() and (out / "student" / "model_index.json").is_file()
    assert list((out / "tensorboard").rglob("events.*"))


def test_a_run_that_was_killed_while_it_exported_needs_one_rank_and_no_teacher_to_end_well(
    train, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    assert train(ema_decay=0.9) == 0
    exported, steps = student_digest(out), (out / "metrics.jsonl").read_bytes()
    record = json.loads((out / "run.json").read_text())
    # As another world left it: it had a batch of more ranks.
    record |= {"state": "running", "identity": {**record["identity"], "global_batch": 64}}
    (out / "run.json").write_text(json.dumps(record))
    shutil.rmtree(out / "student")
    (out / "report.html").unlink()
    monkeypatch.setattr("wandistill.teacher.place", lambda setting: pytest.fail("the teacher was loaded"))

    assert train(ema_decay=0.9) == 0

    assert student_digest(out) == exported and (out / "metrics.jsonl").read_bytes() == steps
    assert json.loads((out / "run.json").read_text())["state"] == "finished" and (out / "report.html").is_file()


def test_a_finished_run_ends_at_once_and_changes_nothing(train, tmp_path, caplog):
    assert train() == 0
    before = (tmp_path / "out" / "metrics.jsonl").stat().st_mtime_ns
    caplog.set_level("INFO")
    assert train() == 0
    assert "finished" in caplog.text
    assert (tmp_path / "out" / "metrics.jsonl").stat().st_mtime_ns == before


def test_another_run_s_directory_is_refused_with_the_difference(train, capsys):
    assert train() == 0
    assert train(lr=5e-4) == ExitCode.BAD_CONFIG
    message = capsys.readouterr().err
    assert "lr" in message and "0.0005" in message and "0.001" in message and "--output_dir" in message
    assert train(resume="never") == ExitCode.BAD_CONFIG


def test_a_directory_that_another_run_writes_into_is_refused_and_free_at_its_end(train, tmp_path, capsys):
    with lock.held(tmp_path / "out", "a test"):
        assert train() == ExitCode.BAD_CONFIG
    message = capsys.readouterr().err
    assert (
        "another run writes there" in message and f"process {os.getpid()} on host" in message and "(a test)" in message
    )
    assert not (tmp_path / "out" / "run.json").exists()
    assert train() == 0


def test_accumulated_micro_batches_are_the_batch_and_an_uneven_last_step_weighs_its_samples(train, tmp_path):
    # 10 items in batches of 4: the last step has two samples.
    epoch = {"max_steps": 0, "num_epochs": 1}
    assert train(batch_size=4, output_dir=tmp_path / "whole", **epoch) == 0
    assert train(batch_size=1, gradient_accumulation_steps=4, output_dir=tmp_path / "parts", **epoch) == 0
    assert len(losses(tmp_path / "whole")) == 3
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(train, tmp_path, caplog):
    settings = {"max_steps": 3, "checkpoint_interval": 1, "keep_checkpoints": 3}
    assert train(**settings) == 0
    digest = student_digest(tmp_path / "out")
    _unfinish(tmp_path / "out")
    newest = next((tmp_path / "out" / "checkpoints" / "step-3" / "state").glob("*.distcp"))
    os.truncate(newest, newest.stat().st_size // 2)
    caplog.set_level("INFO")
    assert train(**settings) == 0
    assert "step-3 is damaged" in caplog.text and "continuing from" in caplog.text and "step-2" in caplog.text
    assert student_digest(tmp_path / "out") == digest
    assert len(losses(tmp_path / "out")) == 3


def test_a_named_checkpoint_that_is_damaged_or_missing_is_an_error(train, tmp_path, capsys):
    assert train(resume="latest") == ExitCode.BAD_CONFIG
    assert "no checkpoint" in capsys.readouterr().err
    assert train(resume=tmp_path / "nowhere") == ExitCode.BAD_CONFIG
    assert "nowhere" in capsys.readouterr().err


def test_a_target_that_is_not_finite_stops_the_run_with_step_time_and_tensor(train, tmp_path, capsys, monkeypatch):
    answer = ResidentTeacher.result
    calls = []

    def poisoned(self, ticket):
        output = answer(self, ticket)
        calls.append(ticket)
        if len(calls) > 3:
            output.velocity[0, 0, 0, 0, 0] = float("nan")
        return output

    assert train(output_dir=tmp_path / "warm") == 0  # fills the caches
    monkeypatch.setattr(ResidentTeacher, "result", poisoned)
    assert train(max_steps=6, checkpoint_interval=2) == ExitCode.TRAINING_FAILED
    message = capsys.readouterr().err
    assert "step 4" in message and "teacher's target" in message and "t = 0." in message
    assert "Traceback" not in message
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-2"]


def test_a_full_disk_keeps_the_former_checkpoint(train, shared, tmp_path, capsys):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("this container may not mount a file system")
    try:
        assert train(output_dir=small / "out", checkpoint_interval=1) == ExitCode.BAD_CONFIG
        assert "the disk lacks" in capsys.readouterr().err
        assert train("--force", output_dir=small / "out", checkpoint_interval=1) == ExitCode.TRAINING_FAILED
        message = capsys.readouterr().err
        assert "step-2" in message and "bytes free" in message and "Traceback" not in message
        checkpoints = small / "out" / "checkpoints"
        assert [path.name for path in checkpoints.iterdir()] == ["step-1"]
        subprocess.run(["mount", "-o", "remount,size=200m", small], check=True)
        assert train(output_dir=small / "out", checkpoint_interval=1) == 0
        assert len(losses(small / "out")) == 2
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_ends_with_its_code_and_the_run_goes_on(number, code, shared, tmp_path):
    out = tmp_path / "out"
    settings = {**shared, "output_dir": out, "max_steps": 2000}
    process = subprocess.Popen(
        [sys.executable, "-m", "wandistill", "train", *flags(settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(out / "metrics.jsonl", process)
    process.send_signal(number)
    message, _ = process.communicate(timeout=120)
    assert process.returncode == code, message
    assert "saved" in message and "Traceback" not in message
    saved = [path.name for path in (out / "checkpoints").iterdir()]
    assert len(saved) == 1 and len(losses(out)) == int(saved[0].removeprefix("step-"))


@pytest.mark.parametrize(
    "settings",
    [
        {"feature_weight": 0.5, "mixed_precision": "bf16"},
        {"init": "auto", "teacher_device_strategy": "cpu", "teacher_dtype": "bfloat16"},
        {"teacher_dtype": "int8"},
        {"teacher_device_strategy": "disk", "teacher_dtype": "float8"},
        {"init": "random", "optimizer": "adamw_bf16", "student_config": "quarter"},
        {"optimizer": "adamw8bit", "ema_decay": 0.99},
        {"embeddings": "online", "objective": "velocity_normalized"},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_settings_that_go_together_train(settings, train, tmp_path):
    assert train("--gradient_checkpointing", **settings) == 0
    assert all(loss > 0 for loss in losses(tmp_path / "out"))


def test_a_narrower_student_trains_with_projected_features(train, tmp_path):
    student = tmp_path / "narrow.yaml"
    student.write_text("num_layers: 4\nnum_attention_heads: 3\nffn_dim: 320\n")
    assert train(student_config=student, feature_weight=0.5) == 0
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["student"]["config"]["num_attention_heads"] == 3


@pytest.mark.parametrize("placement", ["cpu", "offload", "stream"])
def test_a_node_reads_once_what_its_host_copy_and_the_student_begin_with(placement, train, tmp_path, monkeypatch):
    def refuse(*args: object, **more: object) -> None:
        raise AssertionError("the teacher's files are read again")

    monkeypatch.setattr("wandistill.models.weights.safe_open", refuse)
    # With rollouts to make, and where they are there.
    for name in ("first", "second"):
        settings = {"cache_dir": tmp_path / "cache", "rollout_steps": 1, "output_dir": tmp_path / name}
        assert train(teacher_device_strategy=placement, init="high", **settings) == 0


def test_cached_targets_train_without_the_teacher(train, tmp_path, monkeypatch):
    cached = {"targets": "cached"}
    assert train(output_dir=tmp_path / "first", **cached) == 0

    def refuse(*args: object) -> None:
        raise AssertionError("the teacher was loaded")

    monkeypatch.setattr("wandistill.teacher.place", refuse)
    assert train(output_dir=tmp_path / "second", **cached) == 0
    assert losses(tmp_path / "second") == losses(tmp_path / "first")


def test_settings_without_effect_are_told_and_contradictions_refused(train, caplog, capsys):
    assert train(teacher_rank=1, ema_device="cpu") == 0
    assert "--teacher_rank" in caplog.text and "--ema_device" in caplog.text
    assert train(targets="cached", feature_weight=1) == ExitCode.BAD_CONFIG
    message = capsys.readouterr().err
    assert "--targets cached" in message and "--feature_weight" in message
    assert train("--distributed") == ExitCode.BAD_CONFIG
    assert "torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"resolution": "60x64"}, ["60x64", "multiple of 16"]),
        ({"data_path": "/nowhere/prompts.txt"}, ["/nowhere/prompts.txt"]),
        ({"teacher_path": "/nowhere/teacher"}, ["/nowhere/teacher"]),
        ({"student_config": "1b"}, ["1b", "half", "quarter"]),
        ({"mixed_precision": "fp16"}, ["fp16", "GPU"]),
        ({"device": "cuda"}, ["cuda"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_one_paragraph_and_exit_code_2(settings, words, train, tmp_path, capsys):
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert train(**settings) == ExitCode.BAD_CONFIG
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert "Traceback" not in message
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_two_ranks_leave_with_one_message_when_the_configuration_is_bad(shared, tmp_path):
    world = Ranks(2, flags({**shared, "output_dir": tmp_path / "out", "data_path": "/nowhere"}), tmp_path / "log")
    assert world.wait(120) == [ExitCode.BAD_CONFIG] * 2
    assert world.log.read_text().count("/nowhere") >= 1


def _unfinish(out: Path) -> None:
    """Makes a finished run look as if it had been killed before its end."""
    run = json.loads((out / "run.json").read_text())
    run["state"] = "running"
    (out / "run.json").write_text(json.dumps(run))


def test_torchrun_of_one_is_the_same_as_no_torchrun(train, shared, tmp_path):
    assert train() == 0
    finish(torchrun(1, flags({**shared, "output_dir": tmp_path / "torchrun"})))
    assert losses(tmp_path / "torchrun") == pytest.approx(losses(tmp_path / "out"), rel=1e-6)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_torch_s_allocator_grows_its_segments_unless_the_user_says_how_it_works(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr("wandistill.train.run.train", lambda _: seen.append(os.environ.get("PYTORCH_CUDA_ALLOC_CONF")))
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    # Set first, so that it is as before in the end.
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    arguments = ["train", "--teacher_path", "embedded", "--data_path", "prompts.txt"]
    assert here(arguments) == 0
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert here(arguments) == 0
    assert seen == ["expandable_segments:True", "max_split_size_mb:64" if "CUDA" in name else None]


def test_more_kernels_may_wait_for_a_gpu_unless_the_user_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    name = "CUDA_SCALE_LAUNCH_QUEUES"
    monkeypatch.setattr("wandistill.train.run.train", lambda _: seen.append(os.environ.get(name)))
    monkeypatch.setenv(name, "2x")
    assert here(["train", "--teacher_path", "embedded", "--data_path", "prompts.txt"]) == 0
    monkeypatch.delenv(name)
    assert here(["train", "--teacher_path", "embedded", "--data_path", "prompts.txt"]) == 0
    assert seen == ["2x", "4x"]
