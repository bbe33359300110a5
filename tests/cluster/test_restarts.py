"""A pod that is lost in mid-run: the job goes on from its last checkpoint, with the losses of an undisturbed run."""

import pytest

from tests.cluster.chart import STEPS, Release
from tests.cluster.claims import Claim
from tests.cluster.demo import CLAIM, SETTINGS, Demo
from tests.cluster.kubectl import wait_until

pytestmark = pytest.mark.cluster


def test_deleted_worker_comes_back_and_the_losses_are_those_of_an_undisturbed_run(demo: Demo):
    expected = demo.losses()

    # The same settings and the same claim; its own name, since a job's folder carries it.
    own = {"output": {"existingClaim": CLAIM, "create": {"enabled": False}}}
    job = Release(demo.cluster, demo.kubectl, "lost").install(training=SETTINGS, **own)
    wait_until(lambda: "step-2" in _checkpoints(demo.output, job), 300, "the first checkpoint", every=0.2)
    demo.kubectl.run("delete", "pod", f"{job}-worker-0", "--wait=false")

    conditions = demo.kubectl.wait_for_end(job, seconds=420)

    assert "Succeeded" in conditions, conditions
    record = demo.output.json(f"{job}/run.json")
    assert len(record["history"]) > 1, "the run was over before the pod was deleted"
    losses = demo.output.losses(job)
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(expected, abs=1e-5)


def _checkpoints(output: Claim, job: str) -> list[str]:
    return output.run("sh", "-c", f"ls /output/{job}/checkpoints 2>/dev/null || true").split()
