"""Nodes without machines beside a cluster's own: kwok answers in their kubelets' place and says that their pods run."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.cluster.client import api
from tests.cluster.kubectl import Kubectl, wait_until
from tests.tools.build import kwok_stages, tool

MARK = "kwok.x-k8s.io/node"
STAGES = (
    "node/fast/node-initialize.yaml",
    "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "pod/fast/pod-ready.yaml",
    "pod/fast/pod-delete.yaml",
)
# Only simulated nodes have this resource, so that a pod that asks for it gets none of the cluster's own.
RESOURCE = "wandistill.test/simulated"
TOLERATION = {"key": MARK, "operator": "Exists", "effect": "NoSchedule"}
GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
# A class that no provisioner serves: its claims get the volumes below, which no node has to mount.
STORAGE_CLASS = "wandistill-simulated"


def node(name: str, product: str = "", gpus: int = 0, architecture: str = "amd64") -> dict[str, Any]:
    """A large node, with GPUs as NVIDIA's operator labels and taints them."""
    room = {"cpu": "256", "memory": "4Ti", "ephemeral-storage": "100Ti", "pods": "500", RESOURCE: "500"}
    labels = {"kubernetes.io/arch": architecture, "kubernetes.io/os": "linux", "kubernetes.io/hostname": name}
    taints = [{"key": MARK, "value": "fake", "effect": "NoSchedule"}]
    if gpus:
        room["nvidia.com/gpu"] = str(gpus)
        labels["nvidia.com/gpu.product"] = product
        taints.append(GPU_TAINT)
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**labels, MARK: "fake"}, "annotations": {MARK: "fake"}},
        "spec": {"taints": taints},
        "status": {"allocatable": room, "capacity": room},
    }


@contextmanager
def simulated(kubectl: Kubectl, folder: Path, nodes: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Nodes that are there and ready for a while.

    Args:
        folder: where kwok's stages and log are written.
    """
    stages = folder / "stages.yaml"
    stages.write_text("\n---\n".join((kwok_stages() / stage).read_text() for stage in STAGES))
    command = [
        str(tool("kwok")),
        f"--kubeconfig={kubectl.kubeconfig}",
        f"--config={stages}",
        "--manage-all-nodes=false",
        f"--manage-nodes-with-annotation-selector={MARK}=fake",
        "--node-lease-duration-seconds=40",
    ]
    with open(folder / "kwok.log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as kwok:
        try:
            add(kubectl, nodes)
            yield
        finally:
            try:
                # The cluster itself removes what pods are left of a node that is gone.
                kubectl.run("delete", "--raw", f"/api/v1/nodes?labelSelector={quote(f'{MARK}=fake')}")
            finally:
                kwok.terminate()


def add(kubectl: Kubectl, nodes: Iterable[dict[str, Any]]) -> None:
    """Makes nodes while kwok runs, and waits until they are ready."""
    core = api(kubectl).core  # kubectl would make five in a second
    for one in nodes:
        core.create_node(one)
    wait_until(lambda: all(map(_ready, kubectl.items("nodes", f"--selector={MARK}=fake"))), 60, "nodes to be ready")


def _ready(made: dict[str, Any]) -> bool:
    conditions = made["status"].get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def volume(kubectl: Kubectl, claim: str) -> dict[str, Any]:
    """A volume for a claim of the namespace: pods on simulated nodes wait until their claims are bound, no further."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{kubectl.namespace}-{claim}", "labels": {MARK: "fake"}},
        "spec": {
            "capacity": {"storage": "1Ti"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": STORAGE_CLASS,
            "claimRef": {"namespace": kubectl.namespace, "name": claim},
            "nfs": {"server": "192.0.2.1", "path": "/"},
        },
    }
