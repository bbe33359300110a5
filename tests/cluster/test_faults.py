"""What keeps a job from starting: `wandistill status` says which within 30 seconds."""

from typing import Any

import pytest

from tests.cluster.chart import Release, training
from tests.cluster.client import Client
from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.full]

CLAIM = {"existingClaim": "not-there", "create": {"enabled": False}}
IMAGE = {"train": {"repository": "localhost/not-there", "tag": "1"}}
SECRET = [{"secretRef": {"name": "not-there"}}]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"image": IMAGE}, "localhost/not-there:1"),
        ({"output": CLAIM}, 'persistentvolumeclaim "not-there" not found'),
        ({"extraEnvFrom": SECRET}, 'secret "not-there" not found'),
    ],
    ids=["image", "claim", "secret"],
)
def test_status_says_what_is_missing(cluster: Cluster, namespace: Kubectl, fault: dict[str, Any], told: str):
    job = Release(cluster, namespace, "demo").install(training=training(), **fault)
    client = Client(namespace)

    wait_until(lambda: told in " ".join(client.status(job)["reasons"]), 30, f"status to say {told}")
