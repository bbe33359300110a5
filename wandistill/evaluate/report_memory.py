"""The report's section on the teacher's placement: why it was taken, and memory and time as planned and as measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from wandistill.evaluate.rundir import RunDirectory
from wandistill.evaluate.summary import percent
from wandistill.units import format_bytes, format_seconds


def placement_section(run: RunDirectory) -> str:
    """Empty for a run that was not planned."""
    plan, memory = run.record.get("plan"), run.record.get("memory")
    if not plan:
        return ""
    lead = f"{plan['placement']}: {plan['why']}."
    if plan["forced"]:
        lead = f"{plan['placement']}, started with --force: {plan['forced']}."
    cards = [_measured_card(memory)] if memory else []
    cards.append(_terms_card(plan))
    return (
        f'<section><h2>Placement of the teacher</h2><p class="soft">{escape(lead)}</p>'
        f'<div class="charts">{"".join(cards)}</div></section>'
    )


def _measured_card(memory: Mapping[str, Any]) -> str:
    rows = []
    for entry in memory["gpu"]:
        name = f"GPU of rank {entry['rank']}"
        for what, key in (("allocated by torch", "allocated"), ("whole process", "process")):
            figures = entry[f"predicted_{key}_bytes"], entry[f"measured_{key}_bytes"]
            rows.append(_row(f"{name}, {what}", *figures, format_bytes))
    for entry in memory["host"]:
        figures = entry["predicted_bytes"], entry["measured_bytes"]
        rows.append(_row(f"memory of node {entry['node']}", *figures, format_bytes))
    seconds = memory["step_seconds"]
    rows.append(_row("a step", seconds["predicted"], seconds["measured"], format_seconds))
    return _table("Planned and measured", ("", "planned", "measured", "difference"), rows)


def _row(name: str, planned: float | None, measured: float | None, show: Callable[[float], str]) -> tuple[str, ...]:
    shown = [show(value) if value is not None else "–" for value in (planned, measured)]
    difference = f"{(planned / measured - 1) * 100:+.1f} %" if planned and measured else "–"
    return name, *shown, difference


def _terms_card(plan: Mapping[str, Any]) -> str:
    """What the fullest device was planned to hold, the largest term first; without a GPU, the node."""
    ranks, host = plan["ranks"], plan["host"]
    if not host:
        return ""
    on_gpu = any(term["term"] == "cuda context" for rank in ranks for term in rank["terms"])
    fullest = max(ranks, key=lambda rank: rank["peak_bytes"]) if on_gpu else host
    title = f"GPU of rank {fullest['rank']} as planned" if on_gpu else "A node's memory as planned"
    terms = sorted(fullest["terms"], key=lambda term: -term["bytes"])
    total = fullest["peak_bytes"]
    rows = [(term["term"], format_bytes(term["bytes"]), percent(term["bytes"] / total)) for term in terms]
    return _table(title, (f"in phase {fullest['phase']}", format_bytes(total), ""), rows)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>" for row in rows
    )
    return (
        f'<div class="card figures"><h3>{escape(title)}</h3><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
