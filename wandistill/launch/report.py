"""The report of an out-of-memory: once for a whole job, as text, as oom.json, and as a pod's termination message."""

from __future__ import annotations

import json
import os
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandistill.kube.helm import upgrade_here
from wandistill.launch.causes import Kind
from wandistill.launch.flags import shown
from wandistill.launch.memory import RankMemory
from wandistill.launch.question import Question
from wandistill.launch.remedy import measured_limit, on_device, peak_of, remedies
from wandistill.planner.placements import Placement
from wandistill.planner.plan import plan
from wandistill.planner.terms import Phases
from wandistill.units import format_bytes

FILE = "oom.json"
TERMINATION_LOG = "WANDISTILL_TERMINATION_LOG"
# Kubernetes keeps as many bytes of all containers' messages together as three of these.
_TERMINATION_BYTES = 4000


@dataclass(frozen=True)
class Command:
    """How the run was started."""

    start: Sequence[str]  # what stands before the flags of `wandistill train`
    flags: Sequence[str]
    output_dir: str


@dataclass(frozen=True)
class OomReport:
    """What ran out where, and what to change."""

    kind: Kind
    message: str
    rank: int | None
    command: Command
    ranks: Sequence[RankMemory] = ()
    question: Question | None = None  # None: it ran out before anything was planned
    limit: int | None = None  # of the node's memory as it is now
    time: float = field(default_factory=time.time)

    @property
    def phase(self) -> str:
        """Where the rank was."""
        return self._failed.phase if self._failed else "start"

    @property
    def _failed(self) -> RankMemory | None:
        return next((memory for memory in self.ranks if memory.rank == self.rank), None)

    def to_json(self) -> dict[str, Any]:
        """As oom.json holds it."""
        plan_part, advice = self._planned()
        return {
            "schema": 1,
            "time": self.time,
            "kind": self.kind.value,
            "message": self.message,
            "rank": self.rank,
            "phase": self.phase,
            "term": plan_part["term"] if plan_part else None,
            "ranks": [memory.to_json() for memory in self.ranks],
            "plan": plan_part,
            "advice": advice,
            "command": shown([*self.command.start, *self.command.flags]),
        }

    def _planned(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        if self.question is None:
            return None, []
        try:
            request = self.question.request()
            row = plan(request).row(Placement(request.placement))
            device = on_device(self.kind, request)
            found = []
            limit = measured_limit(request, self.kind, self.limit, self._failed)
            for remedy in remedies(request, self.kind, limit):
                told = remedy.to_json(self.command.start, self.command.flags, self.command.output_dir, device)
                helm = upgrade_here(remedy.changes)
                found.append({**told, **({"helm": helm} if helm else {})})
        except Exception as error:  # a report without a plan is better than none, and ranks wait for it
            return {"placement": self.question.config.teacher_device_strategy, "error": str(error), "term": None}, []
        phases = row.ranks[(self.rank or 0) % len(row.ranks)] if device and row.ranks else None
        if phases is None and row.node is not None:
            phases = row.node.host
        terms = _terms(phases, self.phase) if phases else []
        return {
            "placement": row.placement.value,
            "where": "gpu" if device else "host",
            "predicted_bytes": peak_of(row, device),
            "available_bytes": request.machines.device_memory if device else request.machines.host_memory,
            "term": terms[0]["term"] if terms else None,
            "terms": terms,
        }, found


def _terms(phases: Phases, phase: str) -> list[dict[str, Any]]:
    """The terms of a phase, the largest first; those of the peak where the planner has no such phase."""
    terms = [term for term in phases.phases.get(phase, phases.terms) if term.size]
    return [{"term": term.name, "bytes": term.size} for term in sorted(terms, key=lambda term: -term.size)]


def text_of(report: Mapping[str, Any]) -> str:
    """The report for people, from what oom.json holds."""
    who = "a rank" if report["rank"] is None else f"rank {report['rank']}"
    lines = [f"OUT OF MEMORY ({report['kind']}): {who}, in phase {report['phase']}: {report['message']}"]
    lines += [f"  {RankMemory.from_json(memory)}" for memory in report["ranks"]]
    planned = report["plan"]
    if planned and planned.get("terms"):
        largest = ", ".join(f"{term['term']} {format_bytes(term['bytes'])}" for term in planned["terms"][:5])
        lines.append(
            f"plan: {planned['placement']} was to take {format_bytes(planned['predicted_bytes'])} of "
            f"{format_bytes(planned['available_bytes'])} ({planned['where']}); the largest terms of this phase: "
            f"{largest}; measured: {_measured(report)}"
        )
    if report["advice"]:
        lines.append("what makes it fit, the cheapest first (each as one command):")
        for number, one in enumerate(report["advice"], 1):
            goes_on = "goes on from the last checkpoint" if one["continues"] else "begins anew in another directory"
            lines += [
                f" {number}. {one['why']}: {one['placement']} then needs {format_bytes(one['needed_bytes'])}, "
                f"{format_bytes(one['freed_bytes'])} less; {goes_on}",
                f"    {one['command']}",
            ]
            if one.get("helm"):
                lines.append(f"    or, as another job that begins anew: {one['helm']}")
    elif planned:
        lines.append("nothing that was tried in the planner makes it fit on these machines.")
    return "\n".join(lines)


def _measured(report: Mapping[str, Any]) -> str:
    if report["plan"]["where"] == "gpu":
        own = [memory for memory in report["ranks"] if memory["rank"] == report["rank"]]
        return format_bytes(own[0]["reserved_bytes"]) if own and own[0]["reserved_bytes"] is not None else "not known"
    return format_bytes(sum(memory["host_rss_bytes"] for memory in report["ranks"])) + " resident in these ranks"


def write(output_dir: Path, report: Mapping[str, Any]) -> None:
    """Writes oom.json; a directory that cannot be written keeps nobody from ending."""
    with suppress(OSError):
        output_dir.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=output_dir, prefix=".oom.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(report, indent=1) + "\n")
        os.chmod(partial, 0o644)
        os.replace(partial, output_dir / FILE)


def read(output_dir: Path, since: float) -> dict[str, Any] | None:
    """The report in a directory, if it was made after `since`."""
    with suppress(OSError, ValueError):
        report = json.loads((output_dir / FILE).read_text(encoding="utf-8"))
        if report["time"] >= since:
            assert isinstance(report, dict)
            return report
    return None


def write_termination(content: Mapping[str, Any]) -> None:
    """Writes a pod's termination message, one line of JSON; what is too long for it is left out, the longest first.

    Where there is no pod there is no such file.
    """
    path = Path(os.environ.get(TERMINATION_LOG, "/dev/termination-log"))
    if not path.exists():
        return
    short = dict(content)
    line = json.dumps(short)
    while len(line.encode()) >= _TERMINATION_BYTES:
        longest = max(short, key=lambda name: len(json.dumps(short[name])))
        value = short[longest]
        if isinstance(value, list) and len(value) > 1:
            short[longest] = value[: len(value) // 2]
        elif isinstance(value, str):
            short[longest] = textwrap.shorten(value, max(len(value) // 2, 1), placeholder="...")
        else:
            del short[longest]
        line = json.dumps(short)
    with suppress(OSError):
        path.write_text(line + "\n", encoding="utf-8")
