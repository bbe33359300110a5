"""Jobs of a Kueue queue: what the quota has no room for waits suspended, and runs when there is."""

from collections.abc import Iterator

import pytest

from tests.cluster.chart import Release, training
from tests.cluster.client import Client
from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl, wait_until
from tests.cluster.kueue import kueue, make_queue
from tests.cluster.manifests import claim

pytestmark = [pytest.mark.cluster, pytest.mark.full]

POOL = {"nodes": 1, "processesPerNode": 1}
SHORT = training(max_steps=2, checkpoint_interval=2, warmup_steps=1)


@pytest.fixture
def queue(cluster: Cluster, namespace: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A queue with room for one pod."""
    with kueue(cluster, tmp_path_factory.mktemp("kueue")):
        yield make_queue(namespace, pods=1)


def test_second_job_waits_for_the_quota_and_runs_when_the_first_has_ended(
    cluster: Cluster, namespace: Kubectl, queue: str
):
    namespace.apply(claim("shared", cluster.storage_class))
    values = {
        "training": SHORT,
        "pools": {"main": POOL},
        "output": {"existingClaim": "shared", "create": {"enabled": False}},
        "job": {"queue": queue},
    }
    one, two = (Release(cluster, namespace, name) for name in ("one", "two"))
    first = one.install(**values)
    wait_until(lambda: not suspended(namespace, first), 60, "the first job to be admitted")
    second = two.install(**values)

    # An upgrade with the same values does not suspend what Kueue has admitted.
    one.upgrade(**values)
    assert not suspended(namespace, first)
    client = Client(namespace)
    wait_until(lambda: client.status(second)["state"] == "Suspended", 30, "status to say that the second job waits")

    def first_has_ended() -> bool:
        # Looked at before the first job, which may end in between.
        waits = suspended(namespace, second)
        over = "Succeeded" in namespace.conditions(first)
        assert over or waits, "the second job was admitted while the first one ran"
        return over

    wait_until(first_has_ended, 300, "the first job to succeed")
    assert "Succeeded" in namespace.wait_for_end(second, seconds=300)
    assert not suspended(namespace, second)


def suspended(kubectl: Kubectl, job: str) -> bool:
    return bool(kubectl.get("pytorchjob", job)["spec"]["runPolicy"]["suspend"])
