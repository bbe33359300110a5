"""What the demo must reach, read from what it left: `make demo`, and the quarter-size and the untrained student."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.demo

DEMO = Path(os.environ.get("WANDISTILL_DEMO_DIR", "outputs/demo"))


def evaluation(suffix: str = "") -> dict[str, Any]:
    """The figures of the demo, or of the run beside it whose directory has `suffix`."""
    file = DEMO.with_name(DEMO.name + suffix) / "evaluation.json"
    assert file.is_file(), f"{file} is missing: run `make demo` and the runs beside it before the tests marked demo"
    return json.loads(file.read_text())


def test_the_teacher_draws_nearly_all_held_out_captions_right():
    found = evaluation()
    assert found["prompts"] == 512 and found["prompts_in_training_data"] == 0
    assert found["teacher_accuracy"] >= 0.98


def test_the_student_keeps_95_percent_of_it_in_8_steps_with_half_an_expert():
    found = evaluation()
    assert found["steps"] == 8
    assert found["student_accuracy"] >= 0.95 * found["teacher_accuracy"]
    assert found["student_parameters"] <= 0.55 * found["teacher_expert_parameters"]


def test_a_quarter_size_student_draws_half_of_them_right():
    found = evaluation("-quarter")
    assert found["steps"] == 8 and found["prompts"] == 512
    assert found["student_parameters"] < 0.35 * found["teacher_expert_parameters"]
    assert found["student_accuracy"] >= 0.5


def test_a_student_that_is_not_trained_draws_hardly_any():
    assert evaluation("-untrained")["student_accuracy"] < 0.2


@pytest.mark.parametrize("suffix", ["", "-quarter"])
def test_the_loss_fell(suffix: str):
    lines = (DEMO.with_name(DEMO.name + suffix) / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    tenth = max(len(losses) // 10, 1)
    assert sum(losses[-tenth:]) < 0.5 * sum(losses[:tenth])
