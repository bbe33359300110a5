"""`wandistill submit` makes the chart's job, and `status` and `logs` follow it to its end."""

from pathlib import Path

import pytest

from tests.cluster.chart import CHART, small, training
from tests.cluster.claims import Claim
from tests.cluster.client import Client
from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.full]

STEPS = 4


def test_submitted_job_is_followed_to_its_end(cluster: Cluster, namespace: Kubectl, tmp_path: Path):
    client = Client(namespace)
    values = small(cluster) | {"training": training(max_steps=STEPS, checkpoint_interval=STEPS)}
    job = client.submit(values, CHART / "presets" / "cpu-demo.yaml", tmp_path, "demo")

    running = wait_until(lambda: _running(client, job), 180, "status to say that both pods run")
    assert {role: counts["active"] for role, counts in running["replicas"].items()} == {"Master": 1, "Worker": 1}
    lines = client.run("logs", job, seconds=400).splitlines()
    namespace.wait_for_end(job, seconds=60)

    assert client.status(job)["state"] == "Succeeded"
    assert {line.split("]")[0] for line in lines} >= {"[master-0", "[worker-0"}
    assert [line["step"] for line in Claim.open(cluster, namespace, "demo-output").metrics(job)] == [1, 2, 3, 4]
    client.run("delete", job)
    wait_until(lambda: not namespace.items("pytorchjobs"), 60, "the job to go")


def _running(client: Client, job: str) -> dict | None:
    status = client.status(job)
    active = sum(counts["active"] for counts in status["replicas"].values())
    return status if status["state"] == "Running" and active == 2 else None
