"""The GPU benchmark's own program, on the CPU with a tiny teacher."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.gpu import table
from tests.gpu.bench import TEACHER, Bench
from tests.gpu.bench_cases import CASES, NAMES
from tests.gpu.bench_peers import PEERS
from tests.gpu.measure_plan import random_teacher
from wandistill.teacher import BUILDERS, compiled
from wandistill.train.distributed import World


def test_rows_hold_time_memory_bytes_and_whether_answers_are_the_resident_teacher_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, output = tmp_path / "teacher", tmp_path / "measured.yaml"
    random_teacher(teacher, TEACHER, tiny=True)
    table.write("plans", [{"other": 1}], output)
    args = Namespace(as_rank=teacher, output=output, tiny=True, timeline=False, commit="abc", case=None)
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")  # inductor would take a C++ compiler
    for case in (["stream", "diffusers-group-offload", "resident-compiled", "stream-compiled"], ["fsdp2"]):
        args.case = case
        Bench(args, World(0, 1, 0, 1, torch.device("cpu"))).run()
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


def test_every_placement_and_peer_has_a_case() -> None:
    assert set(PEERS) <= set(NAMES)
    # custom is a pipeline as balanced is.
    assert {case.placement for case in CASES if case.placement} == set(BUILDERS) - {"custom"}
