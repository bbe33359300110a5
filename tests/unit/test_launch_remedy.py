"""Advice after an out-of-memory: each line, applied to the run that failed, makes it fit in the planner and parses."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from wandistill.config import FIELDS
from wandistill.launch.causes import Kind
from wandistill.launch.command import parse_train
from wandistill.launch.flags import with_settings
from wandistill.launch.memory import RankMemory
from wandistill.launch.remedy import REPLANNED, measured_limit, on_device, peak_of, remedies, replacement, without_room
from wandistill.planner.command import add_arguments, request_of
from wandistill.planner.placements import Placement
from wandistill.planner.plan import plan
from wandistill.planner.request import PlanRequest
from wandistill.student_config import student_spec
from wandistill.units import parse_bytes

A14B = "--model wan2.2-t2v-a14b --gradient_checkpointing --mixed_precision bf16"
# Configurations that the planner lets start, of several kinds, and what runs out.
RUNS = [
    (f"{A14B} --student 1b --gpu rtx-3090 --gpus 4 --host_memory 256GiB --teacher_device_strategy stream", Kind.CUDA),
    (f"{A14B} --student 1b --gpu a100-80gb --gpus 4 --host_memory 512GiB --teacher_device_strategy sharded", Kind.CUDA),
    (f"{A14B} --student 1b --gpu a100-80gb --gpus 4 --host_memory 512GiB --teacher_device_strategy gpu", Kind.CUDA),
    (
        "--model wan2.1-t2v-1.3b --student half --gpu rtx-4090 --gpus 1 --host_memory 64GiB --batch_size 2 "
        "--teacher_device_strategy gpu",
        Kind.CUDA,
    ),
    (f"{A14B} --student 1b --gpu rtx-3090 --gpus 4 --host_memory 256GiB --teacher_device_strategy cpu", Kind.CGROUP),
    (
        "--model embedded --student half --gpus 4 --host_memory 16GiB --batch_size 32 --resolution 256x256 "
        "--teacher_device_strategy gpu",
        Kind.CGROUP,
    ),
    (
        "--model embedded --student half --gpus 2 --host_memory 16GiB --batch_size 32 --resolution 256x256 "
        "--teacher_device_strategy cpu",
        Kind.SHM,
    ),
]


def request_for(flags: str) -> PlanRequest:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return request_of(parser.parse_args(flags.split()))


def applied(request: PlanRequest, changes: Mapping[str, object]) -> PlanRequest:
    """The request of the run with the flags of `wandistill train` changed."""
    values: dict[str, Any] = dict(changes)
    if "teacher_device_strategy" in values:
        values["placement"] = values.pop("teacher_device_strategy")
    if "student_config" in values:
        spec = student_spec(str(values.pop("student_config")), request.model.architecture)
        values |= {"student": spec.architecture, "student_name": spec.name}
    if "max_memory" in values:
        values["max_memory"] = parse_bytes(str(values["max_memory"]))
    if "resident_blocks" in values:
        values["resident_blocks"] = int(values["resident_blocks"])
    return request.change(**values)


@pytest.mark.parametrize(("flags", "kind"), RUNS, ids=[f"{kind.value} {flags[-60:]}" for flags, kind in RUNS])
def test_every_advice_makes_the_run_fit_frees_what_it_says_and_parses(flags, kind):
    request = request_for(flags)
    assert plan(request).choice is not None, "the run must have been able to start"
    found = remedies(request, kind)
    assert found
    lacking = without_room(request, kind)
    device = on_device(kind, request)
    failed = plan(lacking).row(Placement(request.placement))
    assert not failed.fits
    given = [
        "--teacher_device_strategy",
        request.placement,
        "--batch_size=8",
        "--output_dir",
        "outputs/x",
        "--seed",
        "3",
    ]
    for remedy in found:
        row = plan(applied(lacking, remedy.changes)).choice
        assert row is not None and row.within_margin, remedy.changes
        assert remedy.freed == peak_of(failed, device) - peak_of(row, device) > 0
        content = remedy.to_json(["wandistill", "launch", "--nproc", "4", "--"], given, "outputs/x", device)
        words = shlex.split(content["command"])
        config = parse_train(words[words.index("--") + 1 :])
        assert config.seed == 3
        assert all(str(getattr(config, name)) == str(value) for name, value in remedy.changes.items())
        # What shapes the result cannot be changed in a directory that holds the run.
        assert (config.output_dir == "outputs/x") == remedy.keeps_run == content["continues"]
    kept = [remedy.keeps_run for remedy in found]
    assert kept == sorted(kept, reverse=True)


@pytest.mark.parametrize(("flags", "kind"), RUNS[:2] + RUNS[5:6])
def test_replanning_changes_neither_result_nor_global_batch_and_comes_to_an_end(flags, kind):
    request = request_for(flags)
    before = request.batch_size * request.gradient_accumulation_steps
    tried: list[Mapping[str, object]] = []
    peaks = []
    current = request
    while (remedy := replacement(current, kind, tried)) is not None:
        assert set(remedy.changes) <= set(REPLANNED)
        assert remedy.changes not in tried
        tried.append(remedy.changes)
        current = applied(request, remedy.changes)
        assert current.batch_size * current.gradient_accumulation_steps == before
        row = plan(current).row(Placement(current.placement))
        peaks.append(peak_of(row, on_device(kind, request)))
        assert len(tried) < 30
    assert tried
    assert peaks == sorted(peaks, reverse=True), "each is smaller than the one that failed"


def test_stream_that_ran_out_of_memory_goes_on_with_fewer_blocks_on_the_gpu():
    request = request_for(
        "--model wan2.2-t2v-a14b --student 1b --gpu a100-80gb --gpus 1 --host_memory 256GiB --gradient_checkpointing "
        "--teacher_device_strategy stream"
    )
    kept = int(plan(request).row(Placement.STREAM).settings["resident_blocks"])
    tried: list[Mapping[str, object]] = []
    while kept:
        remedy = replacement(request.change(resident_blocks=kept), Kind.CUDA, tried)
        assert remedy is not None and remedy.changes["teacher_device_strategy"] == "stream"
        assert int(str(remedy.changes["resident_blocks"])) < kept
        assert remedy.freed > 0 and remedy.keeps_run
        tried.append(remedy.changes)
        kept = int(str(remedy.changes["resident_blocks"]))
    assert len(tried) > 1


def test_replanning_knows_the_limit_of_now_which_may_be_lower_than_at_the_start():
    request = request_for(RUNS[5][0])
    assert replacement(request, Kind.CGROUP, []) is not None
    assert replacement(request, Kind.CGROUP, [], limit=1 << 30) is None


def test_what_other_processes_took_of_a_gpu_since_the_plan_is_not_planned_with_again():
    request = request_for(RUNS[3][0])
    free, reserved = 4 << 30, 12 << 30
    limit = measured_limit(request, Kind.CUDA, None, RankMemory(0, "train", 0, None, 3 << 30, reserved, 24 << 30, free))
    assert limit is not None and free + reserved < limit < 17 << 30
    found = remedies(request, Kind.CUDA, limit)
    assert found and all(remedy.row.peak <= limit for remedy in found)
    again = replacement(request.change(batch_size=4), Kind.CUDA, [], limit)
    assert again is not None and again.row.peak <= limit
    assert any(remedy.row.peak > limit for remedy in remedies(request, Kind.CUDA))


@pytest.mark.parametrize("failed", [None, RankMemory(0, "train", 0), RankMemory(0, "train", 0, None, 5, 5, 0, 0)])
def test_a_gpu_that_did_not_tell_its_memory_limits_nothing(failed):
    assert measured_limit(request_for(RUNS[3][0]), Kind.CUDA, 1 << 30, failed) is None


@pytest.mark.parametrize(
    ("flags", "changes", "expected"),
    [
        ("--seed 1 --batch_size 8 --lr=1", {"batch_size": 4}, "--seed 1 --lr=1 --batch_size 4"),
        ("--batch-size=8 --seed 1", {"batch_size": 4}, "--seed 1 --batch_size 4"),
        ("--teacher_on_cpu --seed 1", {"teacher_device_strategy": "disk"}, "--seed 1 --teacher_device_strategy disk"),
        ("--no_gradient_checkpointing", {"gradient_checkpointing": True}, "--gradient_checkpointing"),
        (
            "--gradient-checkpointing --seed 1",
            {"gradient_checkpointing": False},
            "--seed 1 --no_gradient_checkpointing",
        ),
        ("--no_save_samples --seed 1", {"seed": 2}, "--no_save_samples --seed 2"),
    ],
)
def test_flags_are_replaced_however_they_were_written(flags, changes, expected):
    assert " ".join(with_settings(flags.split(), changes)) == expected
    assert set(changes) <= set(FIELDS)
