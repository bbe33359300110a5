"""The trainer's image as a user's cluster gets it: pushed to a registry, pulled by the nodes."""

from collections.abc import Iterator

import pytest

from tests.cluster.chart import PARTS, Release, training
from tests.cluster.client import Client
from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl, wait_until
from tests.cluster.local import layout
from tests.cluster.local.images import push_trainer
from tests.cluster.registry import registry

pytestmark = [pytest.mark.cluster, pytest.mark.full]


@pytest.fixture
def image(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image that no node of the local cluster has; another cluster's comes from where it always does."""
    if not cluster.local:
        yield cluster.train_image
        return
    folder = tmp_path_factory.mktemp("registry")
    with registry(folder):
        push_trainer(folder)
        yield layout.PUSHED_IMAGE


def test_pod_pulls_its_image_from_the_registry_and_takes_its_first_step(
    cluster: Cluster, namespace: Kubectl, image: str
):
    named = {"train": dict(zip(PARTS, image.rsplit(":", 1), strict=True))}
    settings = training(max_steps=2, checkpoint_interval=2, warmup_steps=1)
    pool = {"nodes": 1, "processesPerNode": 1}
    job = Release(cluster, namespace, "demo").install(image=named, training=settings, pools={"main": pool})
    client = Client(namespace)

    wait_until(lambda: steps(client, job), 300, "status to say that a step is taken", every=1)

    if cluster.local:
        told = [event["message"] for event in namespace.items("events") if event["reason"] == "Pulled"]
        assert [message for message in told if f'Successfully pulled image "{image}"' in message], told


def steps(client: Client, job: str) -> int:
    """How many steps of the training `wandistill status` knows of; what comes before it has no loss."""
    progress = client.status(job)["progress"] or {}
    return progress["done"] if progress.get("loss") is not None else 0
