"""How a job is, from what the API server holds: replicas, progress, memory, and the reason when something is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from wandistill.kube.job import ANNOTATION, INSTANCE, Object
from wandistill.units import format_bytes

JOB_LABEL = "training.kubeflow.org/job-name"
ROLE_LABEL = "training.kubeflow.org/replica-type"
INDEX_LABEL = "training.kubeflow.org/replica-index"
OPERATORS_CONTAINER = "init-pytorch"
PATCH = "k8s/operator"
_CONTAINER = "pytorch"
_ENDS = ("Succeeded", "Failed")
_WARNINGS = ("FailedMount", "FailedAttachVolume", "FailedCreate", "FailedCreatePod", "FailedScheduling")
_PROGRESS = re.compile(r"^(?P<what>\w[\w ]*) (?P<done>\d+)/(?P<total>\d+)(?: (?P<text>.*))?, (?P<left>.+) left$")


@dataclass(frozen=True)
class Progress:
    """The last line of progress."""

    what: str
    done: int
    total: int
    text: str = ""
    left: str = ""

    def __str__(self) -> str:
        tail = "".join(f", {part}" for part in (self.text, f"{self.left} left" if self.left else "") if part)
        return f"{self.what} {self.done}/{self.total}{tail}"


@dataclass(frozen=True)
class JobStatus:
    """One job."""

    name: str
    state: str  # Created, Running, Restarting, Suspended, Succeeded, Failed
    replicas: Mapping[str, Mapping[str, int]]
    conditions: Sequence[Mapping[str, str]]
    placement: str = ""
    memory: str = ""
    progress: Progress | None = None
    reasons: Sequence[str] = field(default_factory=tuple)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state in _ENDS

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        progress = self.progress
        return {
            "schema": 1,
            "name": self.name,
            "state": self.state,
            "replicas": {role: dict(counts) for role, counts in self.replicas.items()},
            "conditions": [dict(one) for one in self.conditions],
            "placement": self.placement,
            "memory": self.memory,
            "progress": None
            if progress is None
            else {"what": progress.what, "done": progress.done, "total": progress.total, "text": progress.text},
            "reasons": list(self.reasons),
        }

    def text(self) -> str:
        """For people."""
        counts = ", ".join(
            f"{role} " + " ".join(f"{count} {state}" for state, count in sorted(states.items()) if count)
            for role, states in self.replicas.items()
        )
        lines = [f"{self.name}: {self.state}" + (f" ({counts})" if counts else "")]
        if self.placement:
            lines.append(f"  placement {self.placement}, {self.memory} of memory a pod")
        if self.progress:
            lines.append(f"  {self.progress}")
        return "\n".join([*lines, *(f"  {reason}" for reason in self.reasons)])


def job_status(job: Object, pods: Sequence[Object], events: Sequence[Object] = (), log: str = "") -> JobStatus:
    """The status of a job.

    Args:
        pods: of the job.
        events: of the job and its pods.
        log: the last lines of the Master's pod.
    """
    status = job.get("status") or {}
    conditions = [one for one in status.get("conditions") or [] if one.get("status") == "True"]
    state = conditions[-1]["type"] if conditions else "Created"
    annotations = job["metadata"].get("annotations") or {}
    reasons = [] if state == "Succeeded" else _reasons(job, pods, events)
    if state == "Failed" and not reasons:
        reasons = [conditions[-1].get("message", "")]
    return JobStatus(
        job["metadata"]["name"],
        state,
        {
            role: {key: counts.get(key, 0) for key in ("active", "succeeded", "failed")}
            for role, counts in (status.get("replicaStatuses") or {}).items()
        },
        [{key: one.get(key, "") for key in ("type", "reason", "message", "lastTransitionTime")} for one in conditions],
        annotations.get(f"{ANNOTATION}/placement", ""),
        annotations.get(f"{ANNOTATION}/memory", ""),
        last_progress(log),
        tuple(dict.fromkeys(reasons)),
    )


def last_progress(log: str) -> Progress | None:
    """The last line of progress in a log, as wandistill.train.progress writes it where there is no terminal."""
    for line in reversed(log.splitlines()):
        match = _PROGRESS.match(line)
        if match:
            return Progress(match["what"], int(match["done"]), int(match["total"]), match["text"] or "", match["left"])
    return None


def _reasons(job: Object, pods: Sequence[Object], events: Sequence[Object]) -> list[str]:
    """What keeps the job from running, or ended it: pods first, then events of what no pod tells."""
    found = [reason for pod in pods for reason in _pod_reasons(job, pod)]
    waiting = {pod["metadata"]["name"] for pod in pods if (pod.get("status") or {}).get("phase") == "Pending"}
    for event in sorted(events, key=_seen):
        about = event.get("involvedObject", {}).get("name", "")
        if event.get("reason") in _WARNINGS and (about in waiting or about == job["metadata"]["name"]):
            found.append(f"{about}: {_explained(event.get('message', ''))}")
    return found[-8:]


def _seen(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _pod_reasons(job: Object, pod: Object) -> list[str]:
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    found = []
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            found.append(f"{name}: no node takes it: {condition.get('message', '')}")
    for one in status.get("initContainerStatuses") or []:
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing"):
            patch = f"; {PATCH} has the patch for it" if one["name"] == OPERATORS_CONTAINER else ""
            found.append(f"{name}: container {one['name']}: {_waiting(waiting)}{patch}")
    for one in status.get("containerStatuses") or []:
        if one["name"] != _CONTAINER:
            continue
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            found.append(f"{name}: {_waiting(waiting)}")
        for state in (one.get("lastState") or {}, one.get("state") or {}):
            ended = state.get("terminated")
            if ended and (ended.get("exitCode") or ended.get("reason") == "OOMKilled"):
                found.append(f"{name}: {_ended(job, ended)}")
    if status.get("reason") == "Evicted":
        found.append(f"{name}: evicted: {status.get('message', '')}")
    return found


def _waiting(waiting: Mapping[str, str]) -> str:
    return ": ".join(part for part in (waiting.get("reason", ""), waiting.get("message", "")) if part)


def _explained(message: str) -> str:
    if "violates PodSecurity" in message and OPERATORS_CONTAINER in message:
        return (
            f"the operator's container {OPERATORS_CONTAINER} is refused by the namespace's Pod Security level; {PATCH} "
            f"has the patch for it ({message})"
        )
    return message


def helm_upgrade(job: Object, changes: Mapping[str, Any]) -> str:
    """The command that makes a change of the trainer's settings in the job's release."""
    pool = (job["metadata"].get("annotations") or {}).get(f"{ANNOTATION}/pool", "main")
    release = (job["metadata"].get("labels") or {}).get(INSTANCE, "RELEASE")
    keys = {
        "teacher_device_strategy": f"pools.{pool}.placement",
        "teacher_dtype": f"pools.{pool}.dtype",
        "student_config": "student.config",
    }
    sets = " ".join(
        f"--set {keys.get(name, f'training.{name}')}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in changes.items()
    )
    return f"helm upgrade {release} helm/wandistill --reuse-values {sets}"


def _ended(job: Object, ended: Mapping[str, Any]) -> str:
    """The end of a container, from its termination message where the launcher left one."""
    how = f"{ended.get('reason', 'Error')}, exit code {ended.get('exitCode')}"
    text = str(ended.get("message") or "").strip()
    with suppress(ValueError, AttributeError):
        report = json.loads(text.splitlines()[-1] if text else "")
        parts = [str(report["message"])] if report.get("message") else []
        for one in report.get("advice") or ():
            parts.append(f"{one.get('why', '')}: {one.get('command', '')}")
            if one.get("changes"):
                parts.append(helm_upgrade(job, one["changes"]))
        for memory in report.get("ranks") or ():
            if isinstance(memory, Mapping) and memory.get("host_rss_bytes"):
                parts.append(f"rank {memory.get('rank')}: {format_bytes(memory['host_rss_bytes'])} resident")
        return f"{how}: " + "\n    ".join(parts) if parts else how
    return f"{how}: {text.splitlines()[-1]}" if text else how
