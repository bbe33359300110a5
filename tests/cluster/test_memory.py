"""Memory that does not suffice: told before anything loads where the plan shows it, else seen, explained, replanned."""

from pathlib import Path

import pytest

from tests.cluster.claims import Claim
from tests.cluster.client import Client
from tests.cluster.clusters import Cluster
from tests.cluster.faults import FORCED, LARGE, Killed, Replanned, ended, install
from tests.cluster.kubectl import Kubectl, wait_until
from tests.cluster.local.pods import kill_whole

pytestmark = pytest.mark.cluster


def test_what_does_not_fit_fails_at_once_with_the_planners_sentence(
    cluster: Cluster, namespace: Kubectl, tmp_path: Path
):
    job = install(cluster, namespace, tmp_path, LARGE)

    conditions = namespace.wait_for_end(job, seconds=240)

    assert "Failed" in conditions, conditions
    assert ended(namespace, job)["exitCode"] == 2
    reasons = " ".join(Client(namespace).status(job)["reasons"])
    assert "the node's memory lacks" in reasons and "It would fit with --" in reasons


def test_limit_that_is_too_small_is_seen_as_oom_killed_and_the_job_fails_with_the_reason(killed: Killed):
    assert "Failed" in killed.conditions, killed.conditions
    assert killed.terminated["reason"] == "OOMKilled"
    assert "OOMKilled" in killed.reasons and "memory limit" in killed.reasons
    assert "helm upgrade demo helm/wandistill --reuse-values --set " in killed.reasons


def test_replanning_after_an_oom_kill_succeeds(cluster: Cluster, replanned: Replanned):
    assert "Succeeded" in replanned.conditions, replanned.conditions
    record = Claim.open(cluster, replanned.kubectl, "demo-output").json(f"{replanned.job}/run.json")
    assert record["replans"] and record["state"] == "finished"


def test_replanning_succeeds_where_the_kernel_kills_launcher_and_ranks_together(
    cluster: Cluster, namespace: Kubectl, tmp_path: Path
):
    job = install(cluster, namespace, tmp_path, {**LARGE, **FORCED, "on_oom": "replan"})
    first = wait_until(lambda: master(namespace, job).get("uid"), 60, "the pod")

    def killed() -> bool:
        pod = master(namespace, job)
        if pod.get("uid") != first:
            return True
        if cluster.local and pod.get("container"):
            kill_whole(pod["container"])
        return False

    wait_until(killed, 300, "the kernel to kill the whole pod", every=0.3)
    conditions = namespace.wait_for_end(job, seconds=420)

    assert "Succeeded" in conditions, conditions
    output = Claim.open(cluster, namespace, "demo-output")
    assert "killed whole" in output.json(f"{job}/run.json")["replans"][0]["why"]


def master(kubectl: Kubectl, job: str) -> dict[str, str]:
    """The uid of the Master's pod and the id of its container, as far as they are there."""
    for pod in kubectl.items("pods", "-l", f"training.kubeflow.org/job-name={job}"):
        container = next(iter(pod["status"].get("containerStatuses") or []), {}).get("containerID", "")
        return {"uid": pod["metadata"]["uid"], "container": container.rpartition("/")[2]}
    return {}
