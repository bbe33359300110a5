"""Line, area and bar charts as inline SVG, with nothing but text formatting. No torch.

Colours come from the page (classes `series-0`, `series-1`, ...), so that a chart follows light and dark. Charts are
drawn at the size of a narrow phone's column and scale up, so that their labels stay legible everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 40

Point = tuple[float, float]


def short_number(value: float) -> str:
    """A tick's label: at most three significant digits, with k, M or G for large values."""
    if value == 0:
        return "0"
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{suffix}"
    if abs(value) >= 0.001:
        return f"{value:.3g}"
    return f"{value:.0e}".replace("e-0", "e-")


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    faint: bool = False
    """Drawn thin behind the others, and not named in the legend."""
    color: int = 0


@dataclass(frozen=True)
class Bar:
    """One bar of a chart over a continuous axis, from `start` to `end`."""

    start: float
    end: float
    value: float
    color: int = 0
    title: str = ""


class Axis:
    """Maps values to pixels, linearly or by logarithm, and chooses round ticks."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        if high <= low:
            pad = abs(low) * 0.1 or 1.0
            low, high = (low / 1.1, high * 1.1) if log else (low - pad, high + pad)
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        position = math.log10(value) if self.log else value
        return self.start + (position - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """About `count` round values on the axis."""
        if self.log and math.log10(self.high / self.low) > 0.7:
            return _log_ticks(self.low, self.high)
        step = _round_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str,
    log: bool = False,
    from_zero: bool = False,
    identifier: str = "",
    x_format: Callable[[float], str] = short_number,
    y_format: Callable[[float], str] = short_number,
) -> str:
    """Lines over a common axis; points that are not finite, or not positive where `log`, are left out."""
    drawn = [(s, [p for p in s.points if _drawable(p, log)]) for s in series]
    drawn = [(s, points) for s, points in drawn if points]
    if not drawn:
        return ""
    x_axis = _axis([x for _, points in drawn for x, _ in points], _LEFT, WIDTH - _RIGHT)
    y_axis = _axis([y for _, points in drawn for _, y in points], HEIGHT - _BOTTOM, _TOP, log, from_zero)
    marks = []
    for s, points in drawn:
        path = "M" + "L".join(f"{x_axis(x):.1f} {y_axis(y):.1f}" for x, y in points)
        if len(points) == 1:
            path += "h0.01"  # a single step shows as a dot, through round line caps
        marks.append(f'<path class="line series-{s.color}{" faint" if s.faint else ""}" d="{path}"/>')
    legend = [(s.name, s.color) for s, _ in drawn if not s.faint]
    return _figure(label, x_label, x_axis, y_axis, marks, legend, identifier, x_format, y_format)


def stacked_chart(
    names: Sequence[str],
    rows: Sequence[tuple[float, Sequence[float]]],
    *,
    label: str,
    x_label: str,
    identifier: str = "",
    y_format: Callable[[float], str] = short_number,
) -> str:
    """Areas on top of each other: each row is x and one value per name, not negative and finite."""
    if not rows:
        return ""
    if len(rows) == 1:
        rows = [rows[0], (rows[0][0] + 1, rows[0][1])]
    x_axis = _axis([x for x, _ in rows], _LEFT, WIDTH - _RIGHT)
    y_axis = _axis([sum(values) for _, values in rows], HEIGHT - _BOTTOM, _TOP, from_zero=True)
    marks = []
    for color in range(len(names)):
        upper = [f"{x_axis(x):.1f} {y_axis(sum(values[: color + 1])):.1f}" for x, values in rows]
        lower = [f"{x_axis(x):.1f} {y_axis(sum(values[:color])):.1f}" for x, values in reversed(rows)]
        marks.append(f'<path class="area series-{color}" d="M{"L".join(upper + lower)}Z"/>')
    legend = [(name, color) for color, name in enumerate(names)]
    return _figure(label, x_label, x_axis, y_axis, marks, legend, identifier, short_number, y_format)


def bar_chart(
    bars: Sequence[Bar],
    names: Sequence[str],
    *,
    label: str,
    x_label: str,
    x_range: Point,
    marker: float | None = None,
    identifier: str = "",
    y_format: Callable[[float], str] = short_number,
) -> str:
    """Bars over stretches of the x axis; `marker` is a dashed line at one x, `names` name the colours in use."""
    bars = [bar for bar in bars if math.isfinite(bar.value)]
    if not bars:
        return ""
    x_axis = Axis(*x_range, _LEFT, WIDTH - _RIGHT)
    y_axis = _axis([bar.value for bar in bars], HEIGHT - _BOTTOM, _TOP, from_zero=True)
    marks = []
    for bar in bars:
        left, right, top = x_axis(bar.start) + 1, x_axis(bar.end) - 1, y_axis(bar.value)
        marks.append(
            f'<rect class="bar series-{bar.color}" x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 1):.1f}" '
            f'height="{max(y_axis.start - top, 0.5):.1f}" rx="2"><title>{escape(bar.title)}</title></rect>'
        )
    if marker is not None:
        marks.append(f'<path class="marker" d="M{x_axis(marker):.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>')
    used = sorted({bar.color for bar in bars})
    legend = [(names[color], color) for color in used]
    return _figure(label, x_label, x_axis, y_axis, marks, legend, identifier, short_number, y_format)


def bucket_means(points: Sequence[Point], buckets: int) -> list[Point]:
    """At most `buckets` points, each the mean of consecutive finite ones: the trend of a noisy curve."""
    finite = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
    size = max(1, math.ceil(len(finite) / buckets))
    groups = [finite[i : i + size] for i in range(0, len(finite), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` of the points, with the lowest and the highest of every stretch kept."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept: list[Point] = []
    for i in range(0, len(points), size):
        stretch = [p for p in points[i : i + size] if math.isfinite(p[1])]
        extremes = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])} if stretch else set()
        kept += sorted(extremes)
    return kept


def _drawable(point: Point, log: bool) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1]) and (not log or point[1] > 0)


def _axis(values: Sequence[float], start: float, end: float, log: bool = False, from_zero: bool = False) -> Axis:
    low, high = min(values), max(values)
    return Axis(0.0 if from_zero else low, high or 1.0 if from_zero else high, start, end, log=log)


def _round_step(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    ticks = [factor * 10.0**decade for decade in decades for factor in factors]
    inside = [tick for tick in ticks if low <= tick <= high]
    return inside[:: math.ceil(len(inside) / 7)]


def _figure(
    label: str,
    x_label: str,
    x_axis: Axis,
    y_axis: Axis,
    marks: Sequence[str],
    legend: Sequence[tuple[str, int]],
    identifier: str,
    x_format: Callable[[float], str],
    y_format: Callable[[float], str],
) -> str:
    """The SVG around the marks: grid, ticks and axis label; the legend stands above it as HTML, so that it wraps."""
    base, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    grid = []
    for tick in y_axis.ticks():
        y = y_axis(tick)
        grid.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
        grid.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{escape(y_format(tick))}</text>')
    ticks = x_axis.ticks()
    for tick in ticks:
        x = x_axis(tick)
        anchor = "end" if x > right - 8 else "middle"
        grid.append(f'<text x="{x:.1f}" y="{base + 17}" text-anchor="{anchor}">{escape(x_format(tick))}</text>')
    grid.append(f'<path class="axis" d="M{_LEFT} {base}H{right}"/>')
    grid.append(f'<text class="axis-label" x="{right}" y="{HEIGHT - 5}" text-anchor="end">{escape(x_label)}</text>')
    named = legend if len(legend) > 1 else ()
    keys = "".join(f'<span class="key series-{color}">{escape(name)}</span>' for name, color in named)
    attribute = f' id="{escape(identifier)}"' if identifier else ""
    return (
        (f'<div class="legend">{keys}</div>' if keys else "")
        + f'<svg{attribute} viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        + "".join(grid)
        + "".join(marks)
        + "</svg>"
    )


def is_spread(values: Sequence[float], ratio: float = 10.0) -> bool:
    """Whether positive values span more than `ratio`, so that a logarithmic axis shows more."""
    positive = [v for v in values if math.isfinite(v) and v > 0]
    return bool(positive) and max(positive) / min(positive) > ratio
