"""The report's charts: round ticks, honest curves, plain SVG."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from wandistill.evaluate.charts import (
    Axis,
    Bar,
    Series,
    bar_chart,
    bucket_means,
    line_chart,
    short_number,
    stacked_chart,
    thinned,
)


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [
        (0, 100, False, [0, 20, 40, 60, 80, 100]),
        (0, 1, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (3, 9, False, [4, 6, 8]),
        (0.02, 0.6, True, [0.02, 0.05, 0.1, 0.2, 0.5]),
        (1e-4, 1, True, [1e-4, 1e-3, 1e-2, 1e-1, 1]),
        (1.0, 1.2, True, [1.0, 1.05, 1.1, 1.15, 1.2]),
    ],
)
def test_ticks_are_round(low: float, high: float, log: bool, expected: list[float]):
    assert Axis(low, high, 0, 100, log=log).ticks() == pytest.approx(expected)


@pytest.mark.parametrize("log", [False, True])
def test_an_axis_maps_its_ends_to_its_ends(log: bool):
    axis = Axis(0.1, 10.0, 200.0, 20.0, log=log)
    assert axis(0.1) == pytest.approx(200.0) and axis(10.0) == pytest.approx(20.0)
    assert axis(1.0) == pytest.approx(110.0 if log else 200 - 180 * 0.9 / 9.9)


@pytest.mark.parametrize("log", [False, True])
def test_an_axis_of_one_value_still_has_a_length(log: bool):
    axis = Axis(5.0, 5.0, 0.0, 100.0, log=log)
    assert 0 < axis(5.0) < 100


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1500, "1.5k"), (2.5e6, "2.5M"), (0.25, "0.25"), (0.001, "0.001"), (0.0005, "5e-4"), (1e-12, "1e-12")],
)
def test_tick_labels_are_short(value: float, text: str):
    assert short_number(value) == text


def test_thinning_keeps_the_highest_and_the_lowest_of_every_stretch():
    points = [(float(i), 1.0) for i in range(10_000)]
    points[4321], points[7777] = (4321.0, 50.0), (7777.0, -3.0)
    kept = thinned(points, 200)
    assert len(kept) <= 200 and kept == sorted(kept)
    assert (4321.0, 50.0) in kept and (7777.0, -3.0) in kept


def test_thinning_leaves_short_curves_as_they_are():
    points = [(0.0, 1.0), (1.0, math.nan)]
    assert thinned(points, 10) == points


def test_the_trend_is_the_mean_of_consecutive_finite_points():
    points = [(0.0, 1.0), (1.0, 3.0), (2.0, math.nan), (3.0, 5.0), (4.0, 7.0)]
    assert bucket_means(points, 2) == [(0.5, 2.0), (3.5, 6.0)]


def svg(chart: str) -> ElementTree.Element:
    return ElementTree.fromstring(chart[chart.index("<svg") :])


CHARTS = {
    "lines": line_chart([Series("a & <b>", [(0, 1), (1, 2)])], label='<"label">', x_label="x < y"),
    "one point": line_chart([Series("a", [(1, 1)])], label="l", x_label="x", log=True),
    "areas": stacked_chart(("a", "b"), [(0, (1, 2)), (1, (2, 2))], label="l", x_label="x"),
    "one row": stacked_chart(("a", "b"), [(1, (1, 2))], label="l", x_label="x"),
    "bars": bar_chart([Bar(0, 0.5, 0.1, title="<t>")], ["a"], label="l", x_label="x", x_range=(0, 1), marker=0.5),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_well_formed_and_stays_inside_its_box(name: str):
    root = svg(CHARTS[name])
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for path in root.iter("path"):
        numbers = re.findall(r"([MLHV])([-\d.]+)(?: ([-\d.]+))?", path.attrib["d"])
        for command, first, second in numbers:
            x, y = (None, float(first)) if command == "V" else (float(first), float(second) if second else None)
            assert x is None or 0 <= x <= width
            assert y is None or 0 <= y <= height


@pytest.mark.parametrize("points", [[], [(1, math.nan)], [(math.inf, 1)]])
def test_nothing_to_draw_gives_no_chart(points: list[tuple[float, float]]):
    assert line_chart([Series("a", points)], label="l", x_label="x") == ""


def test_a_logarithmic_curve_leaves_out_what_has_no_logarithm():
    chart = line_chart([Series("a", [(0, 1), (1, 0), (2, -1), (3, 10)])], label="l", x_label="x", log=True)
    (line,) = [p.attrib["d"] for p in svg(chart).iter("path") if p.attrib["class"].startswith("line")]
    assert line.count("L") == 1


def test_only_several_lines_need_a_legend():
    one, two = Series("first", [(0, 1), (1, 2)]), Series("second", [(0, 2), (1, 3)], color=1)
    faint = Series("noise", [(0, 1), (1, 3)], faint=True)
    assert "legend" not in line_chart([faint, one], label="l", x_label="x")
    assert line_chart([faint, one, two], label="l", x_label="x").count('class="key') == 2
