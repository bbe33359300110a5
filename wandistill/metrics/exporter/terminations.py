"""What a pod object says of its containers' ends. Pure: dictionaries in, records out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from wandistill.errors import ExitCode
from wandistill.metrics.names import OOM_EXITS

RUN_LABEL = "training.kubeflow.org/job-name"
TYPE_LABEL = "training.kubeflow.org/replica-type"
INDEX_LABEL = "training.kubeflow.org/replica-index"
POOL_LABEL = "wandistill.dev/pool"
CONTAINER = "pytorch"
GPU_RESOURCE = "nvidia.com/gpu"

_CAUSE_OF_CODE = {
    ExitCode.OUT_OF_MEMORY: "oom",
    ExitCode.BAD_CONFIG: "config",
    ExitCode.TRAINING_FAILED: "training",
    ExitCode.UNEXPECTED: "unexpected",
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.PEER_LOST: "peer",
    ExitCode.TERMINATED: "terminated",
    137: "killed",
}


@dataclass(frozen=True)
class Replica:
    """Who a pod is in its job."""

    namespace: str
    run: str
    pool: str
    kind: str  # master or worker
    index: str

    @property
    def name(self) -> str:
        """As the operator calls it, such as worker-0."""
        return f"{self.kind}-{self.index}"


@dataclass(frozen=True)
class Termination:
    """One end of one container."""

    key: str  # names this end among all of the pod's
    exit_code: int
    oom_killed: bool
    finished: float  # seconds since the epoch; 0: not told
    message: Mapping[str, Any]  # the launcher's JSON line; empty if there is none
    text: str

    @property
    def cause(self) -> str | None:
        """What it failed of, of `CAUSES`; None for a good end."""
        if self.oom_killed and self.exit_code:
            return "oom"
        if self.exit_code == ExitCode.DONE:
            return None
        if self.exit_code == ExitCode.TRAINING_FAILED and "not finite" in self.text:
            return "nonfinite"
        return _CAUSE_OF_CODE.get(self.exit_code, "other")

    @property
    def oom_exit(self) -> str:
        """The exit code as a label of `OOM_EXITS`: a killed process's container may still exit 0 or 1 by itself."""
        return str(self.exit_code) if str(self.exit_code) in OOM_EXITS else "other"


def replica_of(pod: Mapping[str, Any]) -> Replica | None:
    """The replica that `pod` is; None for a pod of no PyTorchJob."""
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    if RUN_LABEL not in labels:
        return None
    return Replica(
        metadata["namespace"],
        labels[RUN_LABEL],
        labels.get(POOL_LABEL, ""),
        labels.get(TYPE_LABEL, "master").lower(),
        labels.get(INDEX_LABEL, "0"),
    )


def terminations(pod: Mapping[str, Any]) -> Iterator[Termination]:
    """The ends of the training container that the pod still tells, oldest first."""
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        if status["name"] != CONTAINER:
            continue
        for place in ("lastState", "state"):
            ended = (status.get(place) or {}).get("terminated")
            if not ended:
                continue
            text = ended.get("message") or ""
            yield Termination(
                # The id is new with each start; without one, which an end before the start has, the time is.
                key=(ended.get("containerID") or ended.get("finishedAt") or str(status.get("restartCount")))[-16:],
                exit_code=int(ended.get("exitCode", 0)),
                oom_killed=ended.get("reason") == "OOMKilled",
                finished=timestamp(ended.get("finishedAt")),
                message=_json_line(text),
                text=text,
            )


def gpu_run(pod: Mapping[str, Any]) -> tuple[int, float, float]:
    """GPUs of the pod, and when its container began and ended (0: not yet), seconds since the epoch."""
    gpus = 0
    for container in pod["spec"].get("containers") or ():
        limits = (container.get("resources") or {}).get("limits") or {}
        gpus += int(limits.get(GPU_RESOURCE, 0))
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        state = status.get("state") or {}
        if status["name"] == CONTAINER and ("running" in state or "terminated" in state):
            of = state.get("running") or state.get("terminated") or {}
            return gpus, timestamp(of.get("startedAt")), timestamp(of.get("finishedAt"))
    return gpus, 0.0, 0.0


def timestamp(value: Any) -> float:
    """Seconds since the epoch of the API's time; 0 for none."""
    if isinstance(value, datetime):
        return value.timestamp()
    try:
        return datetime.fromisoformat(str(value).replace("Z", "+00:00")).timestamp() if value else 0.0
    except ValueError:
        return 0.0


def _json_line(text: str) -> Mapping[str, Any]:
    """The JSON object that is a line of the message; the last one, since logs may come before."""
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}
