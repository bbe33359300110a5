"""Every placement of the teacher that a pod without GPU can show, across pods, and two pools on two nodes by label."""

from typing import Any

import pytest

from tests.cluster.chart import Release, training
from tests.cluster.claims import Claim
from tests.cluster.clusters import Cluster
from tests.cluster.demo import SETTINGS, Demo
from tests.cluster.kubectl import Kubectl, wait_until

pytestmark = pytest.mark.cluster

STEPS = 2
SHORT = {"max_steps": STEPS}


@pytest.mark.parametrize("placement", ["cpu", "balanced"])
def test_placement_gives_the_losses_of_the_demo_which_streams_the_teacher(
    cluster: Cluster, namespace: Kubectl, demo: Demo, placement: str
):
    release = Release(cluster, namespace, "demo")
    job = release.install(training=SETTINGS | SHORT, pools={"main": {"placement": placement}})

    conditions = namespace.wait_for_end(job, seconds=420)

    assert "Succeeded" in conditions, conditions
    output = Claim.open(cluster, namespace, "demo-output")
    assert output.json(f"{job}/run.json")["config"]["teacher_device_strategy"] == placement
    expected = {step: loss for step, loss in demo.losses().items() if step <= STEPS}
    assert output.losses(job) == pytest.approx(expected, abs=1e-5)


def test_teacher_and_students_run_on_the_nodes_of_their_pools(cluster: Cluster, namespace: Kubectl):
    teacher, students = two_nodes(namespace)
    pool: dict[str, Any] = {"nodes": 1, "processesPerNode": 1, "cpus": "200m"}
    release = Release(cluster, namespace, "demo")
    job = release.install(
        preset=None,
        topology="teacher-and-students",
        teacher={"model": "embedded"},
        training=training(**SHORT, guidance_scale=3.0),
        pools={
            "teacher": {**pool, "nodeSelector": {"kubernetes.io/hostname": teacher}},
            "students": {**pool, "processesPerNode": 2, "nodeSelector": {"kubernetes.io/hostname": students}},
        },
        output={"create": {"enabled": True, "size": "1Gi", "accessModes": ["ReadWriteMany"]}},
    )

    # Before the end, since the operator then deletes what still runs.
    nodes = wait_until(lambda: nodes_of(namespace, job), 60, "both pods to have a node")
    assert nodes == {"master": teacher, "worker": students}
    conditions = namespace.wait_for_end(job, seconds=420)
    assert "Succeeded" in conditions, conditions
    output = Claim.open(cluster, namespace, "demo-output")
    assert output.json(f"{job}/run.json")["history"][0]["world_size"] == 3
    assert list(output.losses(job)) == [1, 2]


def nodes_of(kubectl: Kubectl, job: str) -> dict[str, str] | None:
    """The nodes of a job's two pods by their role; None until both have one."""
    found = {
        pod["metadata"]["labels"]["training.kubeflow.org/replica-type"]: pod["spec"].get("nodeName")
        for pod in kubectl.items("pods", "-l", f"training.kubeflow.org/job-name={job}")
    }
    return found if len(found) == 2 and all(found.values()) else None


def two_nodes(kubectl: Kubectl) -> list[str]:
    names = [item["metadata"]["name"] for item in kubectl.items("nodes")]
    assert len(names) >= 2, f"the cluster has {names}: two pools that really run need two nodes"
    return names[:2]
