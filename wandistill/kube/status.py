"""How a job is, from what the API server holds: replicas, progress, memory, and the reason when something is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wandistill.kube import helm
from wandistill.kube.job import ANNOTATION, INSTANCE, Object
from wandistill.kube.progress import CONTAINERS, Progress, ends_of, report_of
from wandistill.units import format_bytes

JOB_LABEL = "training.kubeflow.org/job-name"
INDEX_LABEL = "training.kubeflow.org/replica-index"
OPERATORS_CONTAINER = "init-pytorch"
PATCH = "k8s/operator"
_ENDS = ("Succeeded", "Failed")
_WARNINGS = ("FailedMount", "FailedAttachVolume", "FailedCreate", "FailedCreatePod", "FailedScheduling")


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
        return {
            "schema": 1,
            "name": self.name,
            "state": self.state,
            "replicas": {role: dict(counts) for role, counts in self.replicas.items()},
            "conditions": [dict(one) for one in self.conditions],
            "placement": self.placement,
            "memory": self.memory,
            "progress": self.progress.to_json() if self.progress else None,
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
            memory = self.progress.memory_text()
            lines += [f"  memory: {memory}"] if memory else []
        return "\n".join([*lines, *(f"  {reason}" for reason in self.reasons)])


def job_status(
    job: Object,
    pods: Sequence[Object],
    events: Sequence[Object] = (),
    progress: Progress | None = None,
    notes: Sequence[str] = (),
) -> JobStatus:
    """The status of a job.

    Args:
        pods: of the job.
        events: of the job and its pods.
        notes: further reasons why it does not run.
    """
    status = job.get("status") or {}
    conditions = [one for one in status.get("conditions") or [] if one.get("status") == "True"]
    state = conditions[-1]["type"] if conditions else "Created"
    annotations = job["metadata"].get("annotations") or {}
    reasons = [] if state == "Succeeded" else [*_reasons(job, pods, events), *notes]
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
        progress,
        tuple(dict.fromkeys(reasons)),
    )


def _reasons(job: Object, pods: Sequence[Object], events: Sequence[Object]) -> list[str]:
    """What keeps the job from running, or ended it: pods first, then events of what no pod tells."""
    found = [reason for pod in pods for reason in _pod_reasons(job, pod)]
    unsettled = {pod["metadata"]["name"] for pod in pods if (pod.get("status") or {}).get("phase") == "Pending"}
    if len(pods) < _pods_wanted(job):  # else what kept one from being made is over
        unsettled.add(job["metadata"]["name"])
    for event in sorted(events, key=_seen):
        about = event.get("involvedObject", {}).get("name", "")
        if event.get("reason") in _WARNINGS and about in unsettled:
            found.append(f"{about}: {_explained(event.get('message', ''))}")
    return found[-8:]


def _pods_wanted(job: Object) -> int:
    replicas = ((job.get("spec") or {}).get("pytorchReplicaSpecs") or {}).values()
    return sum(int(replica.get("replicas", 1)) for replica in replicas)


def _seen(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _pod_reasons(job: Object, pod: Object) -> list[str]:
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    found = []
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            found.append(f"{name}: no node takes it{_wanted(pod)}: {condition.get('message', '')}")
    for one in status.get("initContainerStatuses") or []:
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing"):
            patch = f"; {PATCH} has the patch for it" if one["name"] == OPERATORS_CONTAINER else ""
            found.append(f"{name}: container {one['name']}: {_waiting(waiting)}{patch}")
    for one in status.get("containerStatuses") or []:
        if one["name"] not in CONTAINERS:
            continue
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            found.append(f"{name}: {_waiting(waiting)}")
    for ended in ends_of(pod):
        if ended.get("exitCode") or ended.get("reason") == "OOMKilled":
            found.append(f"{name}: {_ended(job, ended)}")
    if status.get("reason") == "Evicted":
        found.append(f"{name}: evicted: {status.get('message', '')}")
    return found


def _wanted(pod: Object) -> str:
    """The pool of a pod, and the labels that its nodes must have."""
    spec = pod.get("spec") or {}
    pool = (pod["metadata"].get("labels") or {}).get(f"{ANNOTATION}/pool")
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    rules = [rule for term in required.get("nodeSelectorTerms") or [] for rule in term.get("matchExpressions") or []]
    labels = [f"{rule['key']} {' or '.join(rule.get('values') or [])}".strip() for rule in rules]
    labels += [f"{key} {value}" for key, value in (spec.get("nodeSelector") or {}).items()]
    return (f" of pool {pool}" if pool else "") + (f" (it wants {', '.join(labels)})" if labels else "")


def _waiting(waiting: Mapping[str, str]) -> str:
    return ": ".join(part for part in (waiting.get("reason", ""), waiting.get("message", "")) if part)


def _explained(message: str) -> str:
    if "violates PodSecurity" in message and OPERATORS_CONTAINER in message:
        return (
            f"the operator's container {OPERATORS_CONTAINER} is refused by the namespace's Pod Security level; {PATCH} "
            f"has the patch for it ({message})"
        )
    return message


def _upgrade(job: Object, changes: Mapping[str, Any]) -> str:
    labels, annotations = (job["metadata"].get(key) or {} for key in ("labels", "annotations"))
    named = annotations.get(f"{ANNOTATION}/pool", "main")
    replicas = ((job.get("spec") or {}).get("pytorchReplicaSpecs") or {}).values()
    pools = [
        (replica["template"].get("metadata", {}).get("labels") or {}).get(f"{ANNOTATION}/pool", named)
        for replica in replicas
    ]
    return helm.upgrade(labels.get(INSTANCE, "RELEASE"), list(dict.fromkeys([named, *pools])), changes)


def _ended(job: Object, ended: Mapping[str, Any]) -> str:
    """The end of a container, from its termination message where the launcher left one."""
    how = f"{ended.get('reason', 'Error')}, exit code {ended.get('exitCode')}"
    report = report_of(ended)
    if not report:
        lines = str(ended.get("message") or "").strip().splitlines()
        return f"{how}: {lines[-1]}" if lines else how
    parts = [str(report["message"])] if report.get("message") else []
    for one in report.get("advice") or ():
        parts.append(f"{one.get('why', '')}: {one.get('command', '')}")
        if one.get("changes"):
            parts.append(_upgrade(job, one["changes"]))
    for memory in report.get("ranks") or ():
        if isinstance(memory, Mapping) and memory.get("host_rss_bytes"):
            parts.append(f"rank {memory.get('rank')}: {format_bytes(memory['host_rss_bytes'])} resident")
    return f"{how}: " + "\n    ".join(parts) if parts else how
