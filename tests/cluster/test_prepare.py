"""`prepare.enabled` on a cluster: the job that prepares and the job that trains begin together, and one waits."""

import json

import pytest

from tests.cluster.chart import Release, training
from tests.cluster.claims import Claim
from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl
from wandistill.launch.prepared import WAITING

pytestmark = [pytest.mark.cluster, pytest.mark.full]

STEPS = 2


def test_pods_that_train_wait_for_the_mark_of_the_job_that_prepares(cluster: Cluster, namespace: Kubectl):
    job = Release(cluster, namespace, "demo").install(
        training=training(max_steps=STEPS, checkpoint_interval=STEPS),
        prepare={"enabled": True, "cpus": "200m"},
        pools={"main": {"processesPerNode": 1, "cpus": "200m"}},
    )

    conditions = namespace.wait_for_end(job, seconds=420)

    assert "Succeeded" in conditions, conditions
    assert namespace.get("job", f"{job}-prepare")["status"]["succeeded"] == 1
    assert WAITING in namespace.run("logs", f"{job}-master-0")
    output = Claim.open(cluster, namespace, "demo-output")
    (mark,) = output.run("sh", "-c", "find /output -name 'prepared-*.json'").split()
    began = output.json(f"{job}/run.json")["history"][0]["started"]
    assert json.loads(output.run("cat", mark))["time"] < began
    assert list(output.losses(job)) == list(range(1, STEPS + 1))
