"""A plan as text for a terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from wandistill.planner.advice import Advice
from wandistill.planner.placements import AUTO, SPECS
from wandistill.planner.plan import Plan, Row
from wandistill.planner.search import Found
from wandistill.planner.terms import Phases, Term
from wandistill.planner.timing import PrepareCost
from wandistill.units import format_bytes, format_seconds

_COLUMNS = ("placement", "verdict", "GPU peak", "in", "host", "/dev/shm", "step", "samples/s")


def text(
    plan: Plan, advice: Sequence[Advice], better: Advice | None, prepare: PrepareCost | None, *, explain: bool
) -> str:
    """What `wandistill plan` prints."""
    lines = [_question(plan), "", *_table(plan), ""]
    if plan.choice is not None:
        chosen = plan.choice
        settings = "".join(f" --{name} {value}" for name, value in chosen.settings.items())
        lines.append(f"choice: --teacher_device_strategy {chosen.placement.value}{settings} ({plan.why})")
        lines += _by_term(chosen)
        if better is not None:
            rate = better.speed / (chosen.time.samples_per_second if chosen.time else 1)
            lines.append(
                f"faster: with {better.flags}, {better.row.placement.value} fits and gives {rate:.1f}x samples a second"
            )
        if prepare is not None:
            lines.append(_prepare(prepare))
    else:
        lines += [f"choice: none: {plan.why}", *_missing(plan)]
        lines += (
            ["what would make it fit:", *_advice(plan, advice)] if advice else ["nothing that was tried makes it fit"]
        )
    if explain:
        lines += ["", *_explained(plan)]
    return "\n".join(lines)


def to_json(plan: Plan, advice: Sequence[Advice], better: Advice | None, prepare: PrepareCost | None) -> dict[str, Any]:
    """The plan as JSON: bytes are integers, seconds numbers."""
    request = plan.request
    machines = request.machines
    return {
        "schema": 1,
        "request": {
            "model": request.model.name,
            "teacher_parameters": request.model.parameters,
            "student": request.student_name,
            "student_parameters": request.student.parameters,
            "gpu": machines.gpu.name if machines.gpu else None,
            "gpu_memory_bytes": machines.device_memory if machines.gpu else None,
            "gpus": machines.ranks if machines.gpu else 0,
            "processes": machines.ranks,
            "nodes": machines.nodes,
            "host_memory_bytes": machines.host_memory,
            "resolution": f"{request.width}x{request.height}",
            "tokens": request.tokens,
            "batch_size": request.batch_size,
            "gradient_accumulation_steps": request.gradient_accumulation_steps,
            "teacher_dtype": request.teacher_dtype,
            "optimizer": request.optimizer,
            "mixed_precision": request.mixed_precision,
            "student_parallel": request.student_parallel,
            "ema_device": request.ema_device,
            "gradient_checkpointing": request.gradient_checkpointing,
            "memory_margin": request.memory_margin,
        },
        "choice": plan.choice.placement.value if plan.choice else None,
        "why": plan.why,
        "placements": [row_json(row) for row in plan.rows],
        "advice": [one.to_json(plan) for one in advice],
        "faster": better.to_json(plan) if better else None,
        "prepare": prepare.to_json() if prepare else None,
    }


def found_text(found: Found) -> str:
    """The answer to an inverse question."""
    if found.value is None or found.plan is None or found.plan.choice is None:
        return f"{found.question}: none; nothing fits, however it is chosen"
    return f"{found.question}: {found.value} (with {found.plan.choice.placement.value})"


def dump(value: dict[str, Any]) -> str:
    """JSON for people and programs."""
    return json.dumps(value, indent=1)


def row_json(row: Row) -> dict[str, Any]:
    """A placement as JSON, with all terms."""
    node = row.node
    return {
        "placement": row.placement.value,
        "fits": row.fits,
        "within_margin": row.within_margin,
        "reason": row.reason,
        "missing_bytes": row.lack.missing if row.lack and not row.fits else 0,
        "settings": row.settings,
        "ranks": [{"rank": index, **rank.to_json()} for index, rank in enumerate(row.ranks)],
        "host": node.host.to_json() if node else None,
        "shm_bytes": node.shm if node else 0,
        "checkpoint_disk_bytes": node.disk if node else 0,
        "time": row.time.to_json() if row.time else None,
    }


def _question(plan: Plan) -> str:
    request, machines = plan.request, plan.request.machines
    where = f"{machines.ranks} x {machines.gpu.title}" if machines.gpu else f"{machines.ranks} processes without a GPU"
    if machines.nodes > 1:
        where = f"{machines.nodes} nodes, each {where}"
    return (
        f"{request.model.title} in {request.teacher_dtype} teaches {request.student_name} "
        f"({request.student.parameters / 1e9:.2f} B parameters, {request.optimizer}, {request.student_parallel}) on "
        f"{where}, {format_bytes(machines.host_memory)} of host memory; {request.width}x{request.height}, "
        f"{request.tokens:,} tokens, batch {request.batch_size} a rank"
    )


def _table(plan: Plan) -> Iterator[str]:
    rows = [_COLUMNS, *(_cells(row) for row in plan.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for index, cells in enumerate(rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        reason = plan.rows[index - 1].reason if index else ""
        yield f"{line}  {reason}".rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    verdict = "fits" if row.within_margin else "tight" if row.fits else "no" if row.ranks else "-"
    if not row.ranks or row.node is None or row.time is None:
        return (row.placement.value, verdict, *[""] * (len(_COLUMNS) - 2))
    return (
        row.placement.value,
        verdict,
        format_bytes(row.peak),
        max(row.ranks, key=lambda rank: rank.peak).phase,
        format_bytes(row.node.host.peak),
        format_bytes(row.node.shm) if row.node.shm else "-",
        format_seconds(row.time.step),
        f"{row.time.samples_per_second:.3g}",
    )


def _by_term(row: Row) -> Iterator[str]:
    """The peak of each kind of rank, and the node's, the largest terms first."""
    kinds: dict[int, list[int]] = {}
    for index, rank in enumerate(row.ranks):
        kinds.setdefault(rank.peak, []).append(index)
    for peak, indices in kinds.items():
        who = f"rank {indices[0]}" if len(indices) == 1 else f"ranks {indices[0]}-{indices[-1]}"
        yield f"  {who}: {format_bytes(peak)} = {_sum(row.ranks[indices[0]].terms)}"
    assert row.node is not None
    yield f"  each node: {format_bytes(row.node.host.peak)} = {_sum(row.node.host.terms)}"
    yield f"  checkpoints on disk: up to {format_bytes(row.node.disk)}"


def _sum(terms: Sequence[Term]) -> str:
    return " + ".join(f"{term.name} {format_bytes(term.size)}" for term in sorted(terms, key=lambda term: -term.size))


def _missing(plan: Plan) -> Iterator[str]:
    """The placement that is nearest to fitting."""
    lacking = [row for row in plan.rows if row.lack is not None]
    if plan.request.placement != AUTO:
        lacking = [row for row in lacking if row.placement.value == plan.request.placement]
    # A teacher that could not be spread says nothing of the students beside it.
    lacking = [row for row in lacking if row.ranks] or lacking
    if lacking:
        nearest = min(lacking, key=lambda row: row.lack.missing if row.lack else 0)
        yield f"missing: with {nearest.placement.value}, the nearest, {nearest.lack}"


def _advice(plan: Plan, advice: Sequence[Advice]) -> Iterator[str]:
    for one in advice:
        why = "; ".join(change.why for change in one.changes)
        freed = one.freed(plan)
        less = f", {format_bytes(freed)} less a GPU" if freed else ""
        yield (
            f"  {one.flags}: {why}; then {one.row.placement.value} fits with {format_bytes(one.row.peak)}{less}, "
            f"{one.speed:.3g} samples a second"
        )


def _prepare(cost: PrepareCost) -> str:
    return (
        f"  caches of {cost.prompts:,} prompts: embeddings {format_bytes(cost.embedding_bytes)} in "
        f"{format_seconds(cost.embedding_seconds)}, latents {format_bytes(cost.latent_bytes)} in "
        f"{format_seconds(cost.latent_seconds)}"
    )


def _explained(plan: Plan) -> Iterator[str]:
    """Every term of every placement with its formula."""
    for row in plan.rows:
        if not row.ranks or row.node is None or row.time is None:
            continue
        yield f"{row.placement.value}: {SPECS[row.placement].summary}"
        fullest: Phases = max(row.ranks, key=lambda rank: rank.peak)
        yield (
            f"  GPU peak in phase {fullest.phase}:"
            if plan.request.on_gpu
            else f"  rank's peak in phase {fullest.phase}:"
        )
        yield from _formulas(fullest)
        yield f"  node, in phase {row.node.host.phase}:"
        yield from _formulas(row.node.host)
        yield from (f"  {formula}" for formula in row.time.formulas)


def _formulas(phases: Phases) -> Iterator[str]:
    for term in phases.terms:
        yield f"    {term.name:<24} {format_bytes(term.size):>10}  {term.formula}"
    yield f"    {'sum':<24} {format_bytes(phases.peak):>10}"
