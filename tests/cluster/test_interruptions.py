"""An eviction, a Master killed while it exports, two runs on one claim: each job ends well."""

import json

import pytest

from tests.cluster.chart import STEPS, Release, training
from tests.cluster.claims import Claim
from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl, wait_until
from tests.cluster.manifests import claim

pytestmark = [pytest.mark.cluster, pytest.mark.full]

# Halts all processes of a container but its first as soon as the student is being written, which takes a part of a
# second: what kills the pod after that kills it in its export, however long the cluster takes over it.
HALT = """
import glob, os, signal, sys, time
while not glob.glob(f"/output/{sys.argv[1]}/.student.*.partial"):
    time.sleep(0.002)
os.kill(-1, signal.SIGSTOP)
print(os.listdir(f"/output/{sys.argv[1]}"))
"""


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


def test_master_killed_during_its_export_comes_back_and_exports(cluster: Cluster, namespace: Kubectl):
    job = Release(cluster, namespace, "demo").install(training=training())
    master = f"{job}-master-0"
    namespace.run("wait", "--for=condition=Ready", f"pod/{master}", "--timeout=120s")
    left = namespace.run("exec", master, "--", "python", "-c", HALT, job, seconds=420)
    assert "'student'" not in left, f"the student was written before the pod could be killed: {left}"
    namespace.run("delete", "pod", master, "--grace-period=0", "--force")

    conditions = namespace.wait_for_end(job, seconds=420)

    assert "Succeeded" in conditions, conditions
    output = Claim.open(cluster, namespace, "demo-output")
    assert output.json(f"{job}/launch/node-0.json")["number"] > 1
    assert list(output.losses(job)) == list(range(1, STEPS + 1))
    assert output.load_student(job)["finite"]
    assert "partial" not in output.run("ls", "-A", f"/output/{job}")


def test_two_runs_at_once_share_one_claim(cluster: Cluster, namespace: Kubectl):
    namespace.apply(claim("shared", cluster.storage_class))
    own = {"output": {"existingClaim": "shared", "create": {"enabled": False}}}
    settings = training(max_steps=2, checkpoint_interval=2, warmup_steps=1)
    jobs = [Release(cluster, namespace, name).install(training=settings, **own) for name in ("one", "two")]

    for job in jobs:
        assert "Succeeded" in namespace.wait_for_end(job, seconds=420)

    output = Claim.open(cluster, namespace, "shared")
    first, second = (output.losses(job) for job in jobs)
    assert list(first) == [1, 2] and first == pytest.approx(second, abs=1e-5)


def _steps(output: Claim, job: str) -> int:
    return int(output.run("sh", "-c", f"cat /output/{job}/metrics.jsonl 2>/dev/null | wc -l"))


def _checkpoints(output: Claim, job: str) -> list[str]:
    return output.run("sh", "-c", f"ls /output/{job}/checkpoints 2>/dev/null || true").split()
