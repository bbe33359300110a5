"""The figures of evaluation.json as a short table for people, on a terminal and in the report. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wandistill.units import format_seconds

Row = tuple[str, str, str]
"""What, the teacher's, the student's."""

_QUESTIONS = {
    "objects": "objects right",
    "relation": "relation right",
    "background": "background right",
    "size": "sizes right (not asked for)",
}


def summary_rows(evaluation: Mapping[str, Any]) -> list[Row]:
    """The rows of the table; a figure that was not measured has none, one that is not finite has a dash."""
    steps = str(evaluation["steps"])
    teacher_seconds, student_seconds = (
        format_seconds(evaluation[f"{side}_seconds_per_image"]) for side in ("teacher", "student")
    )
    return [
        *_accuracy_rows(evaluation),
        ("parameters", *_parameters(evaluation)),
        ("steps", str(evaluation["teacher_steps"]), steps),
        ("guidance", _guidance(evaluation), "folded in"),
        ("sampling, per picture", teacher_seconds, student_seconds),
        ("velocity error, relative L2", "", _or_dash(evaluation["velocity_error"]["relative_l2"], percent)),
        ("latents' RMS distance", "", _distance(evaluation["latent_distance"])),
        ("… of different prompts", _distance(evaluation["latent_distance_unrelated"]), ""),
        ("pixels' RMS distance", "", _distance(evaluation["pixel_distance"])),
        ("… of different prompts", _distance(evaluation["pixel_distance_unrelated"]), ""),
    ]


def percent(share: float) -> str:
    """A share of 1 as a percentage: `98.4 %`."""
    return f"{share * 100:.1f} %"


def count(number: float) -> str:
    """A number of parameters: `2.75 M`, `14.29 B`."""
    for factor, suffix in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= factor:
            return f"{number / factor:.2f}{suffix}"
    return f"{number:.0f}"


def _accuracy_rows(evaluation: Mapping[str, Any]) -> list[Row]:
    if "teacher_accuracy" not in evaluation:
        return []
    shares = [evaluation["judge"][side] for side in ("teacher", "student")]
    rows = [("captions wholly right", percent(evaluation["teacher_accuracy"]), percent(evaluation["student_accuracy"]))]
    return rows + [(text, percent(shares[0][key]), percent(shares[1][key])) for key, text in _QUESTIONS.items()]


def _parameters(evaluation: Mapping[str, Any]) -> tuple[str, str]:
    total, expert = evaluation["teacher_parameters"], evaluation["teacher_expert_parameters"]
    experts = round(total / expert)
    teacher = count(expert) if experts == 1 else f"{experts} x {count(expert)}"
    student = evaluation["student_parameters"]
    return teacher, f"{count(student)} ({percent(student / expert)}{'' if experts == 1 else ' of one'})"


def _guidance(evaluation: Mapping[str, Any]) -> str:
    high, low = evaluation["guidance_scale"], evaluation["guidance_scale_2"]
    one = evaluation["boundary"] is None or high == low
    return f"{high:g}" if one else f"{high:g} high, {low:g} low"


def _distance(value: float | None) -> str:
    return _or_dash(value, lambda number: f"{number:.3f}")


def _or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return "–" if value is None else show(value)
