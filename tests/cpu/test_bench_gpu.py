"""The GPU benchmark's own program, on the CPU with a tiny teacher."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.gpu import bench, table
from tests.gpu.bench import TEACHER, Bench
from tests.gpu.bench_cases import CASES, NAMES
from tests.gpu.bench_peers import PEERS
from tests.gpu.measure_plan import random_teacher
from wandistill.teacher import BUILDERS, compiled
from wandistill.train.distributed import World


def measure(cases: list[str], teacher: Path, output: Path) -> None:
    """Runs cases in a world of one rank."""
    if not teacher.exists():
        random_teacher(teacher, TEACHER, tiny=True)
    args = Namespace(as_rank=teacher, output=output, tiny=True, timeline=False, commit="abc", case=cases)
    Bench(args, World(0, 1, 0, 1, torch.device("cpu"))).run()


def test_rows_hold_time_memory_bytes_and_whether_answers_are_the_resident_teacher_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "measured.yaml"
    table.write("plans", [{"other": 1}], output)
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")  # inductor would take a C++ compiler
    for cases in (["stream", "diffusers-group-offload", "resident-compiled", "stream-compiled"], ["fsdp2"]):
        measure(cases, tmp_path / "teacher", output)
    assert table.read("plans", output) == [{"other": 1}]
    rows = {(row["case"], row["batch"]): row for row in table.read("bench", output)}
    assert sorted(rows) == [
        (case, batch)
        for case in ("diffusers-group-offload", "resident", "resident-compiled", "stream", "stream-compiled")
        for batch in (1, 4, 8)
    ]
    for row in rows.values():
        assert row["least_seconds"] <= row["seconds"] <= row["most_seconds"]
        assert row["tokens"] == 4 * row["batch"] and row["ratio_to_resident"] > 0
        assert row.get("bit_identical", True) and row["on"]["commit"] == "abc"
        # Of all that were measured after it.
        assert ("ratio_to_compiled" in row) is (row["case"] != "resident")
    # Blocks move in every step, what lies outside of them stays.
    assert 0.5 < rows["stream", 1]["moved_bytes"] / rows["stream", 1]["weight_bytes"] < 1
    assert "none of the cases is measured in such a world" in capsys.readouterr().out


def test_training_steps_are_beside_the_resident_teacher_s_and_the_student_s_seconds(tmp_path: Path) -> None:
    output = tmp_path / "measured.yaml"
    measure(["stream-trains-half", "gpu0-trains"], tmp_path / "teacher", output)
    resident, row = table.read("bench", output)
    assert (resident["case"], row["case"]) == ("resident", "stream-trains-half")
    assert (row["ranks"], row["batch"], row["tokens"]) == (1, 8, 32)
    assert row["teacher_alone_seconds"] == resident["seconds"] and row["student_seconds"] > 0
    assert row["expected_seconds"] == pytest.approx(row["teacher_alone_seconds"] + row["student_seconds"], abs=2e-6)
    assert row["ratio_to_expected"] == pytest.approx(row["seconds"] / row["expected_seconds"], rel=1e-3)


def test_what_the_machine_lacks_is_said_before_anything_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "measured.yaml"
    monkeypatch.setattr(bench, "available_bytes", lambda: 0)
    measure(["stream-trains-half"], tmp_path / "teacher", output)
    assert [row["case"] for row in table.read("bench", output)] == ["resident"]
    assert "stream-trains-half, 1 rank(s): left out: it takes 0.0 GB of host memory" in capsys.readouterr().out


def test_every_placement_and_peer_has_a_case() -> None:
    assert set(PEERS) <= set(NAMES)
    # custom is a pipeline as balanced is.
    assert {case.placement for case in CASES if case.placement} == set(BUILDERS) - {"custom"}
