"""The report's charts: loss, memory and seconds over a run, and the velocity error over t. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Any

from wandistill.evaluate.charts import (
    Bar,
    Point,
    Series,
    bar_chart,
    bucket_means,
    is_spread,
    line_chart,
    short_number,
    stacked_chart,
    thinned,
)
from wandistill.evaluate.rundir import RunDirectory
from wandistill.evaluate.summary import percent
from wandistill.units import GIB, MIB, format_bytes, format_seconds

_TREND_POINTS = 60
_DRAWN_POINTS = 800
_EXPERTS = {"transformer": (0, "high-noise expert"), "transformer_2": (1, "low-noise expert")}


def training_section(run: RunDirectory) -> str:
    """Loss, memory and step time from metrics.jsonl."""
    if not run.metrics:
        body = (
            '<p class="note">metrics.jsonl is missing or empty: <code>wandistill train</code> writes a line per '
            "optimizer step, from which loss, memory and step time are drawn here.</p>"
        )
    else:
        cards = [_loss_card(run.metrics), _time_card(run.metrics), _memory_card(run.metrics), _norm_card(run.metrics)]
        body = f'<div class="charts">{"".join(cards)}</div>'
    return f"<section><h2>Training</h2>{body}</section>"


def velocity_card(evaluation: Mapping[str, Any]) -> str:
    """The student's velocity error by t and expert; empty if nothing was compared."""
    error = evaluation["velocity_error"]
    bars = [
        Bar(
            row["t_from"],
            row["t_to"],
            row["relative_l2"],
            _EXPERTS[row["expert"]][0],
            f"t {row['t_from']:g} to {row['t_to']:g}: {percent(row['relative_l2'])} of the teacher's velocity, mean "
            f"square {short_number(row['mse'])}, {row['states']} states",
        )
        for row in error["by_t"]
        if row["relative_l2"] is not None
    ]
    chart = bar_chart(
        bars,
        [name for _, name in _EXPERTS.values()],
        label="Velocity error of the student by t",
        x_label="t, from picture to noise",
        x_range=(0.0, 1.0),
        marker=evaluation["boundary"],
        identifier="velocity",
        y_format=lambda value: f"{value * 100:.3g} %",
    )
    text = (
        "The student's velocity against the teacher's guided one, as relative L2, on the states of the teacher's own "
        "rollouts."
    )
    return _card("Velocity error by t", text, chart) if chart else ""


def _loss_card(metrics: Sequence[Mapping[str, Any]]) -> str:
    points = _points(metrics, "loss")
    finite = [p for p in points if math.isfinite(p[1])]
    if not finite:
        return _card("Loss", "No step has a finite loss.", "")
    trend = bucket_means(finite, _TREND_POINTS)
    # On a logarithmic axis values of zero or less cannot be drawn, so one of them keeps the axis linear.
    log = is_spread([y for _, y in trend]) and min(y for _, y in finite) > 0
    series = [Series("trend", trend)]
    if len(finite) > _TREND_POINTS:
        series.insert(0, Series("each step", thinned(finite, _DRAWN_POINTS), faint=True))
    chart = line_chart(series, label="Loss by step", x_label="step", log=log, from_zero=not log, identifier="loss")
    text = f"From {short_number(trend[0][1])} to {short_number(trend[-1][1])}{', logarithmic' if log else ''}."
    if len(points) > len(finite):
        text += f" {len(points) - len(finite)} steps without a finite loss are left out."
    return _card("Loss", text, chart)


def _time_card(metrics: Sequence[Mapping[str, Any]]) -> str:
    rows = [(float(entry["step"]), _parts(entry)) for entry in metrics if _number(entry.get("step_seconds")) > 0]
    if not rows:
        return ""
    columns = [bucket_means([(x, values[i]) for x, values in rows], _TREND_POINTS) for i in range(3)]
    stacked = [(first[0], (first[1], second[1], third[1])) for first, second, third in zip(*columns, strict=True)]
    means = [sum(values[i] for _, values in rows) / len(rows) for i in range(3)]
    total = sum(means) or 1.0
    parts = [
        f"{name} {percent(mean / total)}" for name, mean in zip(("teacher", "student", "the rest"), means, strict=True)
    ]
    chart = stacked_chart(
        ("teacher", "student", "data, optimizer and the rest"),
        stacked,
        label="Seconds of a step by part",
        x_label="step",
        identifier="time",
        y_format=lambda value: "0" if value == 0 else format_seconds(value),
    )
    return _card("Time of a step", f"{format_seconds(total)} on average: {', '.join(parts)}.", chart)


def _parts(entry: Mapping[str, Any]) -> tuple[float, float, float]:
    """Seconds of a step with the teacher, with the student, and with all else."""
    step, teacher, student = (_number(entry.get(f"{name}_seconds")) for name in ("step", "teacher", "student"))
    return teacher, student, max(step - teacher - student, 0.0)


def _memory_card(metrics: Sequence[Mapping[str, Any]]) -> str:
    seconds = list(accumulate(_number(entry.get("step_seconds")) for entry in metrics))
    unit, factor = next((u, f) for u, f, most in _TIME_UNITS if seconds[-1] <= most)
    named = (("GPU, peak", "gpu_peak_bytes", 0), ("host, resident", "host_rss_bytes", 1))
    used = {key: [_number(entry.get(key)) for entry in metrics] for _, key, _ in named}
    size, size_unit = (GIB, "GiB") if max(map(max, used.values())) >= GIB else (MIB, "MiB")
    series, texts = [], []
    for name, key, color in named:
        if (highest := max(used[key])) > 0:
            points = [(time / factor, count / size) for time, count in zip(seconds, used[key], strict=True)]
            series.append(Series(name, thinned(points, _DRAWN_POINTS), color=color))
            texts.append(f"{name} at most {format_bytes(highest)}")
    chart = line_chart(
        series,
        label="Memory over time",
        x_label=f"{unit} of training",
        from_zero=True,
        identifier="memory",
        y_format=lambda value: f"{value:g} {size_unit}",
    )
    text = f"{'; '.join(texts)}, of rank 0." if texts else "No step says how much memory it used."
    return _card("Memory", text, chart)


def _norm_card(metrics: Sequence[Mapping[str, Any]]) -> str:
    points = [p for p in _points(metrics, "grad_norm") if math.isfinite(p[1]) and p[1] > 0]
    if not points:
        return ""
    trend = bucket_means(points, _TREND_POINTS)
    series = [Series("each step", thinned(points, _DRAWN_POINTS), faint=True), Series("trend", trend)]
    log = is_spread([y for _, y in points])
    chart = line_chart(
        series, label="Gradient norm by step", x_label="step", log=log, from_zero=not log, identifier="norm"
    )
    return _card("Gradient norm", f"Before clipping{', logarithmic' if log else ''}.", chart)


_TIME_UNITS = (("seconds", 1.0, 180.0), ("minutes", 60.0, 3 * 3600.0), ("hours", 3600.0, math.inf))


def _points(metrics: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """(step, value) of each line that has the figure; a value that is null counts as not finite."""
    return [
        (float(entry["step"]), float(entry[name]) if isinstance(entry[name], int | float) else math.nan)
        for entry in metrics
        if name in entry
    ]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _card(title: str, text: str, chart: str) -> str:
    return f'<div class="card"><h3>{escape(title)}</h3><p class="soft">{escape(text)}</p>{chart}</div>'
