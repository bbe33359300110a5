"""Every placement gives the resident teacher's numbers, on real ranks; what is wrong, or dies, is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from placement_cases import (
    DELAYS,
    DISAGREEMENTS,
    FAULTS,
    KILLED,
    LOSS_TOLERANCE,
    LOSSES,
    MEMORY,
    SERVED,
    TARGETS,
    TOLERANCE,
    WORLDS,
    Case,
)

from wandistill.config import PLACEMENTS
from wandistill.errors import ExitCode
from wandistill.teacher import BUILDERS

# Worlds of up to four ranks, one after the other: minutes with a core to themselves, more beside other tests.
pytestmark = pytest.mark.timeout(1800)

PROGRAM = Path(__file__).with_name("placement_world.py")


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all worlds found: each is started once and does all its cases."""
    folder = tmp_path_factory.mktemp("placements")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)], env=environment, capture_output=True, text=True, timeout=1750
    )
    assert run.returncode == 0, run.stderr[-5000:]
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for world, (ranks, _) in WORLDS.items():
        assert found[f"world {world}"]["codes"] == [0] * ranks, (list(found)[-1], run.stderr[-5000:])
    return found


def each(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def of_ranks(findings: dict[str, Any], case: Case) -> list[dict[str, Any]]:
    """What each rank found."""
    assert case.name in findings, "an earlier case of its world failed"
    found: list[dict[str, Any]] = findings[case.name]["ranks"]
    errors = [one["error"] for one in found if "error" in one]
    assert not errors, errors[0]
    return found


def test_every_placement_is_in_the_table_of_tolerances() -> None:
    assert set(TOLERANCE) == {*BUILDERS, "registered"}
    assert set(PLACEMENTS) - {"auto"} == set(BUILDERS)


@each(TARGETS)
def test_targets_and_features_equal_the_resident_teachers(findings: dict[str, Any], case: Case) -> None:
    tolerance, why = TOLERANCE[case.placement]
    assert max(one["distance"] for one in of_ranks(findings, case)) <= tolerance, why


@each(LOSSES)
def test_a_run_has_the_losses_of_one_with_the_resident_teacher(findings: dict[str, Any], case: Case) -> None:
    for one in of_ranks(findings, case):
        assert len(set(one["losses"])) == 10
        assert one["losses"] == pytest.approx(one["expected"], abs=LOSS_TOLERANCE, rel=0)


@each(DELAYS)
def test_ranks_that_are_late_at_other_times_answer_as_the_resident_teacher(
    findings: dict[str, Any], case: Case
) -> None:
    for one in of_ranks(findings, case):
        assert one["equal"] == [True] * 100


@each(FAULTS)
def test_a_fault_is_noticed(findings: dict[str, Any], case: Case) -> None:
    tolerance, _ = TOLERANCE[case.placement]
    assert max(one["distance"] for one in of_ranks(findings, case)) > tolerance + 1e-3


@each(MEMORY)
def test_each_rank_loads_its_part_alone(findings: dict[str, Any], case: Case) -> None:
    found = of_ranks(findings, case)
    whole, held = found[0]["whole"], [one["bytes"] for one in found]
    padding = 1.01  # tensors begin at multiples of 256 bytes, records at pages
    assert whole <= sum(held) <= whole * padding
    block = whole / 8  # the embedded teacher has as many, and little else
    most = {
        "gpu0": [whole, 0, 0, 0],
        "balanced": [whole / 4 + block] * 4,
        "sequential": [whole / 4 + block] * 3 + [0],
        "sharded": [whole / 4] * 4,
    }[case.placement]
    assert all(one <= limit * padding for one, limit in zip(held, most, strict=True)), held


@each(SERVED)
def test_a_teacher_rank_that_does_not_train_serves_until_the_others_close(findings: dict[str, Any], case: Case) -> None:
    assert max(one["distance"] for one in of_ranks(findings, case)) == 0.0


@each(DISAGREEMENTS)
def test_ranks_that_ask_different_experts_are_told_on_every_rank(findings: dict[str, Any], case: Case) -> None:
    for one in of_ranks(findings, case):
        assert "rank 0 transformer, rank 1 transformer_2" in one["said"]


@each(KILLED)
def test_a_killed_rank_ends_the_others_within_a_minute_and_is_named(findings: dict[str, Any], case: Case) -> None:
    found = findings[case.name]
    assert found["codes"] == [ExitCode.PEER_LOST, -9]
    assert "rank 1 is gone" in found["said"][0]
    assert found["seconds"] < 60
