"""Dashboards without Grafana: a page drawn from the same JSON, with each panel's queries run on a Prometheus.

`python -m tests.metrics.page URL FOLDER [SECONDS [JOB]]` writes a page for each dashboard, over the last SECONDS (600)
and of all jobs or one, and with Chromium on PATH a picture of it.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tests.metrics.prometheus import ROOT, Prometheus, with_variables
from tests.metrics.units import formatted

DASHBOARDS = ROOT / "helm" / "wandistill" / "dashboards"
CELL, WIDTH = 38, 1600  # Grafana's height of a row, and the page's width, in pixels
PALETTE = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#705da0", "#37872d", "#fade2a")
COLORS = {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c"}
STYLE = """
body { margin: 0; padding: 12px; background: #111217; color: #ccccdc; font: 13px/1.35 sans-serif; }
h1 { font-size: 18px; font-weight: 500; margin: 0 0 8px; }
main { display: grid; grid-template-columns: repeat(24, 1fr); gap: 8px; }
h2 { font-size: 15px; font-weight: 500; margin: 0; align-self: end; }
section { background: #181b1f; border: 1px solid #2a2d33; border-radius: 3px; padding: 6px 8px; overflow: hidden;
  min-width: 0; display: flex; flex-direction: column; }
h3 { font-size: 13px; font-weight: 500; margin: 0 0 4px; }
.body { flex: 1; min-height: 0; overflow: hidden; display: flex; flex-direction: column; }
.empty { margin: auto; color: #7b8087; }
.stats { flex: 1; display: flex; gap: 6px; align-items: stretch; }
.stat { flex: 1; display: flex; flex-direction: column; justify-content: center; text-align: center; min-width: 0; }
.stat b { font-size: 26px; font-weight: 500; white-space: nowrap; }
.name { font-size: 11px; color: #9fa3ab; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.bar { display: grid; grid-template-columns: 40% 1fr auto; gap: 6px; align-items: center; margin: 2px 0; }
.bar i { height: 16px; display: block; border-radius: 2px; }
table { border-collapse: collapse; width: 100%; font-size: 12px; }
th { text-align: left; color: #6e9fff; font-weight: 500; }
th, td { padding: 3px 8px 3px 0; border-bottom: 1px solid #2a2d33; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; max-width: 220px; }
svg { flex: 1; min-height: 0; width: 100%; } svg text { font-size: 11px; fill: #9fa3ab; }
.legend { display: flex; flex-wrap: wrap; gap: 0 12px; font-size: 11px; max-height: 44px; overflow: hidden; }
.legend span::before { content: ""; display: inline-block; width: 12px; height: 3px; margin: 0 5px 3px 0;
  background: var(--c); vertical-align: middle; }
"""

Row = tuple[str, dict[str, str], list[tuple[float, float]]]  # legend, labels, (time, value)s
Json = dict[str, Any]
Ask = Callable[[str, bool], Sequence[Json]]


def page(
    dashboard: Json, ask: Callable[[str, bool], Sequence[Json]], start: float, end: float
) -> tuple[str, list[str]]:
    """The page, and the titles of panels without data.

    Args:
        ask: the series of a query, at `end` alone if that is asked.
    """
    parts, empty = [], []
    for panel in dashboard["panels"]:
        box = panel["gridPos"]
        place = f"grid-column: {box['x'] + 1} / span {box['w']}; grid-row: {box['y'] + 1} / span {box['h']}"
        if panel["type"] == "row":
            parts.append(f'<h2 style="{place}">{escape(panel["title"])}</h2>')
            continue
        rows = _rows(panel, ask)
        if not rows:
            empty.append(panel["title"])
        body = _DRAW[panel["type"]](panel, rows, start, end) if rows else '<p class="empty">No data</p>'
        parts.append(
            f'<section style="{place}"><h3>{escape(panel["title"])}</h3><div class="body">{body}</div></section>'
        )
    style = f"{STYLE} main {{ grid-auto-rows: {CELL - 8}px; }}"
    return (
        f'<!doctype html><meta charset="utf-8"><title>{escape(dashboard["title"])}</title><style>{style}</style>'
        f"<h1>{escape(dashboard['title'])}</h1><main>{''.join(parts)}</main>",
        empty,
    )


def _rows(panel: Json, ask: Ask) -> list[Row]:
    rows: list[Row] = []
    for target in panel["targets"]:
        for found in ask(target["expr"], target["instant"]):
            labels = found["metric"]
            legend = target["legendFormat"]
            for name in re.findall(r"\{\{(\w+)\}\}", legend):
                legend = legend.replace(f"{{{{{name}}}}}", labels.get(name, ""))
            values = found.get("values") or [found["value"]]
            points = [(float(when), float(value)) for when, value in values]
            rows.append((legend or panel["title"], labels, [point for point in points if math.isfinite(point[1])]))
    return sorted((row for row in rows if row[2]), key=lambda row: row[0])


def _color(panel: Json, value: float) -> str:
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    passed = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return COLORS[passed[-1]]


def _unit(panel: Json) -> str:
    return panel["fieldConfig"]["defaults"]["unit"]


def _stat(panel: Json, rows: Sequence[Row], start: float, end: float) -> str:
    parts = []
    for name, _, points in rows:
        value = points[-1][1]
        text = escape(formatted(value, _unit(panel)))
        parts.append(
            f'<div class="stat"><span class="name">{escape(name)}</span>'
            f'<b style="color: {_color(panel, value)}">{text}</b></div>'
        )
    return f'<div class="stats">{"".join(parts)}</div>'


def _bars(panel: Json, rows: Sequence[Row], start: float, end: float) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    last = [points[-1][1] for _, _, points in rows]
    most = defaults.get("max", max(*last, 0) or 1)
    parts = []
    for (name, _, _), value in zip(rows, last, strict=True):
        share = min(max(value / most, 0), 1)
        parts.append(
            f'<div class="bar"><span class="name">{escape(name)}</span><i style="width: {share:.1%}; background: '
            f'{_color(panel, value)}"></i><b>{escape(formatted(value, _unit(panel)))}</b></div>'
        )
    return "".join(parts)


def _table(panel: Json, rows: Sequence[Row], start: float, end: float) -> str:
    (organize,) = [step["options"] for step in panel["transformations"] if step["id"] == "organize"]
    names = organize["renameByName"]
    head = "".join(f"<th>{escape(heading)}</th>" for heading in names.values())
    lines = []
    for _, labels, points in rows:
        cells = {**labels, "Value": formatted(points[-1][1], _unit(panel))}
        lines.append("<tr>" + "".join(f"<td>{escape(cells.get(name, ''))}</td>" for name in names) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _lines(panel: Json, rows: Sequence[Row], start: float, end: float) -> str:
    defaults, box = panel["fieldConfig"]["defaults"], panel["gridPos"]
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    width, height = box["w"] * WIDTH / 24 - 30, box["h"] * CELL - 90
    left, base = 66, height - 18
    below: dict[float, float] = {}
    drawn = []
    for _, _, points in rows:
        lower = [(when, below.get(when, 0.0)) for when, _ in points] if stacked else []
        upper = [(when, value + below.get(when, 0.0)) for when, value in points] if stacked else points
        below |= dict(upper)
        drawn.append((lower, upper))
    values = [value for _, upper in drawn for _, value in upper]
    low, high = defaults.get("min", min(values)), defaults.get("max", max(values))
    if high <= low:
        high = low + (abs(low) or 1)
    step = _round((high - low) / 4, binary=_unit(panel) in ("bytes", "Bps"))
    low = math.floor(low / step) * step
    high = max(high, low + step)

    def at(point: tuple[float, float]) -> str:
        x = left + (point[0] - start) / (end - start) * (width - left - 8)
        return f"{x:.1f} {base - (point[1] - low) / (high - low) * (base - 8):.1f}"

    marks = []
    for number in range(math.floor((high - low) / step + 1e-9) + 1):
        tick = low + number * step
        y = base - (tick - low) / (high - low) * (base - 8)
        marks.append(f'<path d="M{left} {y:.1f}H{width - 8:.0f}" stroke="#2a2d33"/>')
        label = escape(formatted(tick, _unit(panel)))
        marks.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    times = max(min(4, int((width - left) / 90)), 1)  # as many as there is room for
    for part in range(times):
        when = start + (end - start) * part / times
        x = left + part / times * (width - left - 8)
        text = time.strftime("%H:%M:%S", time.gmtime(when))
        marks.append(f'<text x="{x:.1f}" y="{height - 3:.0f}">{text}</text>')
    keys = []
    for index, ((name, _, _), (lower, upper)) in enumerate(zip(rows, drawn, strict=True)):
        color = PALETTE[index % len(PALETTE)]
        line = "M" + "L".join(map(at, upper)) + ("h0.1" if len(upper) == 1 else "")
        if lower:
            area = "M" + "L".join(map(at, [*upper, *reversed(lower)])) + "Z"
            marks.append(f'<path d="{area}" fill="{color}" opacity="0.3"/>')
        marks.append(f'<path d="{line}" fill="none" stroke="{color}" stroke-width="1.5" stroke-linecap="round"/>')
        keys.append(f'<span style="--c: {color}">{escape(name)}</span>')
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}">{"".join(marks)}</svg><div class="legend">{"".join(keys)}</div>'
    )


_DRAW: dict[str, Callable[[Json, Sequence[Row], float, float], str]] = {
    "stat": _stat,
    "bargauge": _bars,
    "table": _table,
    "timeseries": _lines,
}


def _round(step: float, binary: bool) -> float:
    """The next round number: of bytes a power of two, else 1, 2 or 5 times a power of ten."""
    if binary and step >= 1:
        return float(2 ** math.ceil(math.log2(step)))
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def write(server: Prometheus, folder: Path, seconds: float, job: str = ".*") -> dict[str, list[str]]:
    """Writes the pages, and pictures where Chromium is; returns the panels without data of each dashboard."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.time()
    start = end - seconds

    def ask(expr: str, instant: bool) -> Sequence[Json]:
        expr = with_variables(expr, ".*", job)
        return server.query(expr, end) if instant else server.query_range(expr, start, end, max(seconds / 300, 1))

    found = {}
    for path in sorted(DASHBOARDS.glob("*.json")):
        text, found[path.stem] = page(json.loads(path.read_text()), ask, start, end)
        (folder / f"{path.stem}.html").write_text(text, encoding="utf-8")
        picture(folder / f"{path.stem}.html")
    return found


def picture(file: Path) -> None:
    """A picture of a page beside it, if Chromium is on PATH."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        return
    rows = max((int(row) + int(span) for row, span in re.findall(r"grid-row: (\d+) / span (\d+)", file.read_text())))
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    size = [f"--window-size={WIDTH},{rows * CELL + 60}", f"--screenshot={file.with_suffix('.png')}"]
    subprocess.run([*command, *size, file.resolve().as_uri()], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    url, target, *rest = sys.argv[1:]
    print(json.dumps(write(Prometheus(url), Path(target), float(rest[0]) if rest else 600.0, *rest[1:2])))
