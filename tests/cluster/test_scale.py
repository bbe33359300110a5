"""Pools of GPUs and hundreds of jobs, on simulated nodes: where pods are put, and what the client asks of a cluster."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.cluster.chart import CHART, Release, small
from tests.cluster.client import Client, api
from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl, wait_until
from tests.cluster.manifests import claim
from tests.cluster.simulated import RESOURCE, STORAGE_CLASS, TOLERATION, add, node, simulated, volume
from wandistill.catalog import find_gpu, gpus
from wandistill.kube import client as kube
from wandistill.kube import values as chart_values
from wandistill.kube.job import ANNOTATION

pytestmark = [pytest.mark.cluster, pytest.mark.full]

# The monitoring's preset has no pools: it trains nothing.
PRESETS = {
    path.stem: content["pools"]
    for path in sorted((CHART / "presets").glob("*.yaml"))
    if "pools" in (content := yaml.safe_load(path.read_text()))
}
SIZES = (1, 2, 4, 8)
WITHOUT_GPU = "simulated-cpu"
# Claims of these names have no volume of the cluster's own.
RELEASE, CLAIM = "scale", "crowd"
JOBS, PODS = 200, 5
# What a client might poll, of one namespace; controllers list whole clusters, and watch them.
KINDS = ("pytorchjobs", "pods", "events", "configmaps", "persistentvolumeclaims")
SCOPES = ("namespace", "resource")
CROWD = "NVIDIA-H100-80GB-HBM3"


def name_of(product: str, count: int, architecture: str = "amd64") -> str:
    return f"{product.lower()}-{count}-{architecture}"


@pytest.fixture(scope="module")
def nodes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """A node of every size with every GPU of the catalogue; of the largest there is one with the wrong processor."""
    kubectl = Kubectl(cluster.kubeconfig)
    products = [product for gpu in gpus().values() for product in gpu.products]
    made = [node(name_of(product, count), product, count) for product in products for count in SIZES]
    made += [node(name_of(product, 8, "arm64"), product, 8, "arm64") for product in products]
    made += [node(WITHOUT_GPU), node(f"{WITHOUT_GPU}-arm64", architecture="arm64")]
    with simulated(kubectl, tmp_path_factory.mktemp("kwok"), made):
        yield kubectl


@pytest.fixture(autouse=True)
def volumes(namespace: Kubectl) -> Iterator[None]:
    """Volumes for the claims that are made here; a claim would not take one that a former claim has had."""
    made = [volume(namespace, name) for name in (f"{RELEASE}-output", f"{RELEASE}-cache", CLAIM)]
    names = [one["metadata"]["name"] for one in made]
    namespace.run("delete", "pv", "--ignore-not-found", *names)
    namespace.apply(*made)
    yield
    namespace.run("delete", "pv", "--wait=false", *names)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_runs_on_the_nodes_that_it_is_for_and_nowhere_else(
    cluster: Cluster, namespace: Kubectl, nodes: Kubectl, preset: str
):
    pools = PRESETS[preset]
    own = {pool: nodes_for(given) for pool, given in pools.items()}
    named = sorted(set().union(*own.values()))
    expected = {pool: given.get("nodes", 1) for pool, given in pools.items()}

    nodes.run("cordon", *named)
    try:
        Release(cluster, namespace, RELEASE).install(preset, **on_simulated(pools))
        wait_until(lambda: by_pool(namespace, refused) == expected, 60, "all pods to find no node among the others")
    finally:
        nodes.run("uncordon", *named)
    wait_until(lambda: by_pool(namespace, runs) == expected, 60, "all pods to run")

    for pod in namespace.items("pods"):
        assert pod["spec"]["nodeName"] in own[pool_of(pod)]


def test_status_of_two_hundred_jobs_is_two_lists_and_takes_less_than_five_seconds(
    cluster: Cluster, namespace: Kubectl, nodes: Kubectl
):
    add(nodes, (node(f"simulated-crowd-{number}", CROWD, 8) for number in range(JOBS * PODS // 8)))
    shared = {"create": {"enabled": False}, "existingClaim": CLAIM}
    own = {"pools": {"main": {"nodes": PODS}}, "output": shared, "teacher": {"cache": shared}}
    preset = chart_values.load(CHART / "presets" / "1x80gb.yaml")
    values = chart_values.resolve(preset, small(cluster), on_simulated(["main"]), own)
    namespace.apply(claim(CLAIM, STORAGE_CLASS))
    client = kube.Client(api(namespace))
    for number in range(JOBS):
        client.submit(values, f"run-{number}")
    wait_until(lambda: all(map(is_whole, namespace.items("pytorchjobs"))), 450, "all pods of all jobs to run", every=5)

    before, began = reads(nodes), time.monotonic()
    told = [json.loads(line) for line in Client(namespace).run("status", "--json").splitlines()]
    seconds, asked = time.monotonic() - began, reads(nodes) - before

    assert len(told) == JOBS and {one["state"] for one in told} == {"Running"}
    assert all([counts["active"] for counts in one["replicas"].values()] == [1, PODS - 1] for one in told)
    print(f"wandistill status of {JOBS} jobs: {seconds:.1f} s")
    assert seconds < 5
    assert asked == {("LIST", "pods"): 1, ("LIST", "pytorchjobs"): 1}


def on_simulated(pools: Iterable[str]) -> dict[str, Any]:
    """Values that leave a preset's affinity as it is, and let its pods run on simulated nodes only."""
    created = {"create": {"storageClass": STORAGE_CLASS}}
    return {
        "extraResources": {RESOURCE: 1},
        "pools": {pool: {"tolerations": [TOLERATION]} for pool in pools},
        "output": created,
        "teacher": {"cache": created},
    }


def nodes_for(pool: Mapping[str, Any]) -> set[str]:
    """The simulated nodes that a pool's pods may have."""
    count = pool.get("gpusPerNode", 0)
    if not count:
        return {WITHOUT_GPU}
    return {name_of(product, size) for product in find_gpu(pool["gpu"]).products for size in SIZES if size >= count}


def by_pool(namespace: Kubectl, holds: Callable[[dict[str, Any]], bool]) -> dict[str, int]:
    """How many pods of each pool something holds of."""
    return Counter(pool_of(pod) for pod in namespace.items("pods") if holds(pod))


def pool_of(pod: dict[str, Any]) -> str:
    return pod["metadata"]["labels"][f"{ANNOTATION}/pool"]


def refused(pod: dict[str, Any]) -> bool:
    """Whether the scheduler has looked at all nodes and found none."""
    return any(one.get("reason") == "Unschedulable" for one in pod["status"].get("conditions") or [])


def runs(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") == "Running"


def is_whole(job: dict[str, Any]) -> bool:
    """Whether the operator says that all pods of a job run."""
    replicas = job.get("status", {}).get("replicaStatuses") or {}
    return sum(counts.get("active", 0) for counts in replicas.values()) == PODS


def reads(kubectl: Kubectl) -> Counter[tuple[str, str]]:
    """How often the API server was asked for objects of one namespace or for one object of it, by verb and kind."""
    found: Counter[tuple[str, str]] = Counter()
    for line in kubectl.run("get", "--raw", "/metrics").splitlines():
        if line.startswith("apiserver_request_total{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            if labels["verb"] in ("GET", "LIST", "WATCH") and labels["resource"] in KINDS and labels["scope"] in SCOPES:
                found[labels["verb"], labels["resource"]] += int(float(line.split()[-1]))
    return found
