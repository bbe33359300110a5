"""Runs that something happens to, made once for all tests that look at them: kills for memory; a stop, then NaN."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.chart import Release, computed, training
from tests.cluster.client import Client
from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl

# One rank whose activations are most of its memory. Too much for LIMIT in one batch, not in smaller ones.
LARGE = {"resolution": "128x128", "batch_size": 128, "max_steps": 1, "warmup_steps": 0}
LIMIT = "1200Mi"
# The plan is not asked, and the launcher does not stop the ranks before the kernel does.
FORCED = {"force": True, "host_memory_stop": 1.0}

# The first step takes every weight out of range, and the second one's loss is not finite. A step takes seconds.
HUGE = {"lr": 1e30, "batch_size": 256, "warmup_steps": 0, "max_steps": 4, "checkpoint_interval": 1}
# Stops the one rank of a pod as soon as it has told of its first checkpoint, which is in its second step.
STOP = """
import glob, json, os, signal, time
while True:
    for name in glob.glob("/tmp/wandistill-metrics-*/rank-0.json"):
        told = json.load(open(name))
        if "wandistill_checkpoint_bytes" in told["samples"]:
            os.kill(told["pid"], signal.SIGSTOP)
            print(told["pid"])
            raise SystemExit
    time.sleep(0.1)
"""


@dataclass(frozen=True)
class Killed:
    """How a run ended whose memory limit was too small, and which pod its kill was in."""

    kubectl: Kubectl
    job: str
    conditions: dict[str, dict[str, Any]]
    terminated: dict[str, Any]
    reasons: str

    @classmethod
    def run(cls, cluster: Cluster, kubectl: Kubectl, folder: Path, **values: Any) -> Killed:
        job = install(cluster, kubectl, folder, {**LARGE, **FORCED, "on_oom": "stop"}, **values)
        conditions = kubectl.wait_for_end(job, seconds=420)
        reasons = " ".join(Client(kubectl).status(job)["reasons"])
        return cls(kubectl, job, conditions, ended(kubectl, job), reasons)

    @property
    def pod(self) -> str:
        return f"{self.job}-master-0"


@dataclass(frozen=True)
class Replanned:
    """How a run ended that was killed for memory and then went on with another plan, in the same pod."""

    kubectl: Kubectl
    job: str
    conditions: dict[str, dict[str, Any]]

    @classmethod
    def run(cls, cluster: Cluster, kubectl: Kubectl, folder: Path, **values: Any) -> Replanned:
        job = install(cluster, kubectl, folder, {**LARGE, **FORCED, "on_oom": "replan"}, **values)
        return cls(kubectl, job, kubectl.wait_for_end(job, seconds=540))


@dataclass(frozen=True)
class Stopped:
    """A run whose one rank is stopped after its first step; what it does when it goes on is not finite."""

    kubectl: Kubectl
    job: str
    rank: int

    @classmethod
    def run(cls, cluster: Cluster, kubectl: Kubectl, folder: Path, **values: Any) -> Stopped:
        job = install(cluster, kubectl, folder, HUGE, memory="4Gi", **values)
        kubectl.run("wait", "--for=condition=Ready", f"pod/{job}-master-0", "--timeout=120s")
        rank = kubectl.run("exec", f"{job}-master-0", "--", "python", "-c", STOP, seconds=240)
        return cls(kubectl, job, int(rank))

    def go_on(self) -> None:
        self.kubectl.run("exec", f"{self.job}-master-0", "--", "kill", "-CONT", str(self.rank))


def install(
    cluster: Cluster, kubectl: Kubectl, folder: Path, settings: dict[str, Any], *, memory: str = LIMIT, **values: Any
) -> str:
    """A job of one pod of one rank with little memory."""
    sizes = {"memory": memory}
    pool = {"nodes": 1, "processesPerNode": 1, "resources": {"requests": sizes, "limits": sizes}}
    return Release(cluster, kubectl, "demo").install(
        **computed(cluster, folder, training=training(**settings), pools={"main": pool}, **values)
    )


def ended(kubectl: Kubectl, job: str) -> dict[str, Any]:
    """How the Master's container ended."""
    (status,) = kubectl.get("pod", f"{job}-master-0")["status"]["containerStatuses"]
    return status["state"]["terminated"]
