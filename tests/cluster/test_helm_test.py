"""`helm test` on a real cluster: it passes where a run can start, and says which claim keeps it from that."""

from typing import Any

import pytest

from tests.cluster.chart import HelmError, Release, training
from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.manifests import claim

pytestmark = [pytest.mark.cluster, pytest.mark.full]

SUSPENDED = {"suspend": True}


def test_it_passes_where_operator_image_and_claims_are_there(cluster: Cluster, namespace: Kubectl):
    release = Release(cluster, namespace, "demo")
    release.install(training=training(), job=SUSPENDED)

    assert release.test().count("Succeeded") == len(("ServiceAccount", "Role", "RoleBinding", "claims", "folders"))
    # What it made is gone.
    assert not [pod for pod in namespace.items("pods") if pod["metadata"]["name"].startswith("demo-test")]


@pytest.mark.parametrize(
    ("name", "made", "told"),
    [
        ("shared", {"accessModes": ["ReadWriteOnce"]}, "claim shared is ReadWriteOnce, but 2 pods mount it"),
        # The namespace has no volume for a claim of this name.
        ("alone", {"storageClassName": "not-there"}, 'not bound: storageclass.storage.k8s.io "not-there" not found'),
        ("missing", None, "claim missing is not in namespace"),
    ],
    ids=["unshared", "unbound", "missing"],
)
def test_it_says_which_claim_keeps_a_run_from_starting(
    cluster: Cluster, namespace: Kubectl, name: str, made: dict[str, Any] | None, told: str
):
    if made is not None:
        one = claim(name, cluster.storage_class)
        one["spec"] |= made
        namespace.apply(one)
    release = Release(cluster, namespace, "demo")
    own = {"output": {"existingClaim": name, "create": {"enabled": False}}}
    release.install(training=training(), job=SUSPENDED, **own)

    with pytest.raises(HelmError, match="demo-test-claims failed"):
        release.test()

    # `helm test --logs` asks for logs of all that a test makes, accounts and roles too, and so prints none.
    assert told in namespace.run("logs", "demo-test-claims")
