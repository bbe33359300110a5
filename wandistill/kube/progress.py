"""How far a run is, from three sources: its Master's log, the ends of its pods, and what the exporter remembers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from wandistill.units import format_bytes, format_seconds

ROLE_LABEL = "training.kubeflow.org/replica-type"
CONTAINERS = ("pytorch", "prepare")
Object = Mapping[str, Any]


@dataclass(frozen=True)
class Progress:
    """The last that is known."""

    what: str  # such as training
    done: int
    total: int | None = None
    loss: float | None = None
    seconds_left: float | None = None
    memory: Mapping[str, int] = field(default_factory=dict)  # *_bytes of rank 0's GPU and of the Master's pod
    source: str = "log"  # log, termination or exporter

    def __str__(self) -> str:
        parts = [f"{self.what} {self.done}" + (f"/{self.total}" if self.total is not None else "")]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.seconds_left is not None:
            parts.append(f"{format_seconds(self.seconds_left)} left")
        if self.source == "exporter":
            parts.append("as the exporter remembers")
        return ", ".join(parts)

    def memory_text(self) -> str:
        """Memory beside the plan; empty where nothing is known."""
        told = []
        for key, name in (("gpu", "rank 0's GPU"), ("pod", "the Master's pod")):
            used, planned = self.memory.get(f"{key}_bytes"), self.memory.get(f"{key}_planned_bytes")
            if used is not None and planned is not None:
                limit = self.memory.get(f"{key}_limit_bytes")
                most = f", limit {format_bytes(limit)}" if limit is not None else ""
                told.append(f"{name} {format_bytes(used)}, planned {format_bytes(planned)}{most}")
        return "; ".join(told)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "what": self.what,
            "done": self.done,
            "total": self.total,
            "loss": self.loss,
            "seconds_left": self.seconds_left,
            "memory": dict(self.memory),
            "source": self.source,
        }


def of_log(log: str) -> Progress | None:
    """The last line of progress in a log, as wandistill.train.progress writes it in a pod."""
    for line in reversed(log.splitlines()):
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            found = json.loads(line)
            memory = {key: int(value) for key, value in found.items() if key.endswith("_bytes")}
            return Progress(
                str(found["progress"]),
                int(found["done"]),
                int(found["total"]),
                found.get("loss"),
                found.get("seconds_left"),
                memory,
            )
    return None


def of_ends(pods: Sequence[Object]) -> Progress | None:
    """The last step that the Master's container told when it ended."""
    for pod in pods:
        if (pod["metadata"].get("labels") or {}).get(ROLE_LABEL) != "master":
            continue
        for report in reversed([end for end in map(report_of, ends_of(pod)) if end.get("step") is not None]):
            return Progress("step", int(report["step"]), loss=report.get("loss"), source="termination")
    return None


def of_exporter(state: str, namespace: str, name: str) -> tuple[Progress | None, list[str]]:
    """The last step of a run, and what went wrong in it, from the exporter's ConfigMap.

    Args:
        state: what `wandistill.metrics.exporter.ledger` keeps there.
    """
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        run = json.loads(state)["runs"][f"{namespace}/{name}"]
        last = run["last"]
        step = last.get("step")
        progress = None if step is None else Progress("step", int(step), loss=last.get("loss"), source="exporter")
        failures = [f"{cause} {count}" for cause, count in sorted(run["failures"].items())]
        kills = sum(run["oom_killed"].values())
        told = [f"containers that ended badly, by cause: {', '.join(failures)}"] if failures else []
        told += [f"containers that the kernel killed for memory: {kills}"] if kills else []
        return progress, told
    return None, []


def ends_of(pod: Object) -> list[Object]:
    """How the pod's own container ended, the end before first."""
    found = []
    for one in (pod.get("status") or {}).get("containerStatuses") or []:
        if one["name"] in CONTAINERS:
            states = [(one.get(key) or {}).get("terminated") for key in ("lastState", "state")]
            found += [state for state in states if state]
    return found


def report_of(ended: Object) -> dict[str, Any]:
    """The launcher's termination message, one line of JSON; empty where it left none."""
    lines = str(ended.get("message") or "").strip().splitlines()
    with suppress(ValueError, IndexError):
        report = json.loads(lines[-1])
        return report if isinstance(report, dict) else {}
    return {}
