"""An evicted pod saves before it goes, and the job ends well."""

import json

import pytest

from tests.cluster.chart import Release, training
from tests.cluster.claims import Claim
from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.full]


def test_evicted_pod_saves_within_its_grace_period_and_the_job_goes_on(cluster: Cluster, namespace: Kubectl):
    # No checkpoint is due before the end, so one that is there was saved for the eviction.
    job = Release(cluster, namespace, "demo").install(training=training(max_steps=40, checkpoint_interval=1000))
    output = Claim.open(cluster, namespace, "demo-output")
    wait_until(lambda: _steps(output, job) >= 2, 300, "two steps", every=0.2)
    pod = f"{job}-worker-0"
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    path = f"/api/v1/namespaces/{namespace.namespace}/pods/{pod}/eviction"

    namespace.run("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))

    wait_until(lambda: _checkpoints(output, job), 60, "a checkpoint of the evicted job")
    assert "Succeeded" in namespace.wait_for_end(job, seconds=420)
    assert [line["step"] for line in output.metrics(job)] == list(range(1, 41))
    assert len(output.json(f"{job}/run.json")["history"]) == 2


def _steps(output: Claim, job: str) -> int:
    return int(output.run("sh", "-c", f"cat /output/{job}/metrics.jsonl 2>/dev/null | wc -l"))


def _checkpoints(output: Claim, job: str) -> list[str]:
    return output.run("sh", "-c", f"ls /output/{job}/checkpoints 2>/dev/null || true").split()
