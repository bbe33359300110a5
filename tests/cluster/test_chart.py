"""`helm install` of the demo on a real cluster: two pods of two ranks, upgrades, and what an uninstall leaves."""

import re

import pytest

from tests.cluster.chart import STEPS, HelmError, Release, training
from tests.cluster.clusters import Cluster
from tests.cluster.demo import Demo
from tests.cluster.kubectl import Kubectl, KubectlError, wait_until

pytestmark = pytest.mark.cluster

WORKER = "training.kubeflow.org/replica-type=worker"
SUSPENDED = {"suspend": True}


def test_namespace_that_enforces_the_restricted_level_takes_all_pods_the_operators_container_included(demo: Demo):
    with pytest.raises(KubectlError, match="violates PodSecurity"):
        demo.kubectl.run("run", "plain", f"--image={demo.cluster.train_image}", "--dry-run=server")

    worker = wait_until(lambda: demo.kubectl.items("pods", "-l", WORKER), 60, "the worker's pod")[0]

    assert [container["name"] for container in worker["spec"]["initContainers"]] == ["init-pytorch"]
    assert worker["spec"]["initContainers"][0]["securityContext"]["runAsNonRoot"] is True


def test_upgrade_with_the_same_values_leaves_the_running_job_alone(demo: Demo):
    before = demo.kubectl.get("pytorchjob", demo.job)

    demo.release.upgrade(**demo.values)

    assert demo.release.jobs() == [demo.job]
    after = demo.kubectl.get("pytorchjob", demo.job)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"] == before["spec"]
    assert not {"Succeeded", "Failed"} & set(demo.kubectl.conditions(demo.job)), "the job was over before the upgrade"


def test_two_pods_of_two_ranks_leave_a_student_that_diffusers_loads_and_a_report_with_its_evaluation(demo: Demo):
    conditions = demo.wait()

    assert "Succeeded" in conditions, conditions
    output = demo.output
    assert [line["step"] for line in output.metrics(demo.job)] == list(range(1, STEPS + 1))
    assert [entry["world_size"] for entry in output.json(f"{demo.job}/run.json")["history"]] == [4]
    assert output.load_student(demo.job)["finite"]
    figures = output.evaluate(demo.job)
    assert 0 <= figures["student_accuracy"] <= figures["teacher_accuracy"] <= 1
    assert "captions wholly right" in output.run("cat", f"/output/{demo.job}/report.html")


def test_upgrade_with_changed_values_is_refused_while_the_job_runs_or_keeps_it_where_that_is_asked(
    cluster: Cluster, namespace: Kubectl
):
    release = Release(cluster, namespace, "demo")
    job = release.install(training=training(), job=SUSPENDED)

    with pytest.raises(HelmError, match=f"job {job} of this release is still running"):
        release.upgrade(training=training(seed=1), job=SUSPENDED)
    assert release.jobs() == [job]

    # What was installed without it is kept only after the command that the refusal tells.
    keep = {**SUSPENDED, "onChange": "keep"}
    with pytest.raises(HelmError, match=f"job {job} of this release .* was installed without") as told:
        release.upgrade(training=training(seed=1), job=keep)
    (command,) = re.findall("'kubectl (.*?)'", str(told.value))
    namespace.run(*command.split())
    release.upgrade(training=training(seed=1), job=keep)
    assert len(release.jobs()) == 2 and job in release.jobs()


def test_upgrade_replaces_the_job_where_that_is_asked_and_uninstall_leaves_nothing_but_the_claim(
    cluster: Cluster, namespace: Kubectl
):
    release = Release(cluster, namespace, "demo")
    job = release.install(training=training(), job=SUSPENDED)

    release.upgrade(training=training(seed=1), job={**SUSPENDED, "onChange": "replace"})
    wait_until(lambda: len(release.jobs()) == 1 and release.jobs() != [job], 30, "the job to be replaced")

    release.uninstall()
    wait_until(lambda: not namespace.items("pytorchjobs"), 60, "the job to go")
    kept = [item["metadata"]["name"] for item in namespace.items("persistentvolumeclaims")]
    assert kept == ["demo-output"]
    for kind in ("configmaps", "secrets", "networkpolicies", "services"):
        assert not [item for item in namespace.items(kind) if item["metadata"]["name"] != "kube-root-ca.crt"], kind
