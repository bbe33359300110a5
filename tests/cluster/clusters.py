"""Which cluster the tests run on: that of $KUBECONFIG, or the one that `python -m tests.cluster.local up` starts."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.kubectl import Kubectl
from tests.cluster.local import layout
from tests.cluster.local.__main__ import up

# The claims that tests make: each namespace has a volume for each, and takes no other's.
CLAIMS = ("output", "demo-output", "shared", "distil-cpu-demo-output")
# What a cluster of the user's own has to say beside its kubeconfig.
SETTINGS = ("WANDISTILL_E2E_TRAIN_IMAGE", "WANDISTILL_E2E_CONTROL_IMAGE", "WANDISTILL_E2E_STORAGE_CLASS")


@dataclass(frozen=True)
class Cluster:
    """What a test has to know of its cluster."""

    kubeconfig: Path
    train_image: str
    control_image: str
    storage_class: str
    local: bool

    def make_volumes(self, kubectl: Kubectl) -> None:
        """On the local cluster: folders of this machine that pods of both nodes share, for the namespace's claims."""
        if self.local:
            kubectl.apply(storage_class(self.storage_class))
            for name in volume_names(kubectl):
                (layout.VOLUMES / name).mkdir(parents=True, exist_ok=True)
            kubectl.apply(*(volume(kubectl.namespace, claim, self.storage_class) for claim in CLAIMS))

    def remove_volumes(self, kubectl: Kubectl) -> None:
        if self.local:
            kubectl.run("delete", "pv", *volume_names(kubectl), "--ignore-not-found")
            for name in volume_names(kubectl):
                if (layout.VOLUMES / name).exists():
                    shutil.rmtree(layout.VOLUMES / name)


def current() -> Cluster:
    """The cluster to test on; without $KUBECONFIG the local one, started if it doesn't run.

    Raises:
        ValueError: $KUBECONFIG names a cluster, but not which images and storage class it has.
    """
    kubeconfig = os.environ.get("KUBECONFIG")
    if kubeconfig and Path(kubeconfig) != layout.KUBECONFIG:
        if missing := [name for name in SETTINGS if not os.environ.get(name)]:
            raise ValueError(
                f"KUBECONFIG is {kubeconfig}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: "
                f"name the images that this cluster can pull and a storage class with ReadWriteMany."
            )
        return Cluster(Path(kubeconfig), *(os.environ[name] for name in SETTINGS), local=False)
    up()
    return Cluster(layout.KUBECONFIG, layout.TRAIN_IMAGE, layout.CONTROL_IMAGE, "shared", local=True)


def volume_names(kubectl: Kubectl) -> list[str]:
    return [f"{kubectl.namespace}-{claim}" for claim in CLAIMS]


def storage_class(name: str) -> dict:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "Immediate",
    }


def volume(namespace: str, claim: str, storage: str) -> dict:
    """A volume of type `local` and not hostPath: the kubelet gives it to the pod's fsGroup, as on a real share."""
    name = f"{namespace}-{claim}"
    terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": list(layout.NODES)}]}]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Ti"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": storage,
            "claimRef": {"namespace": namespace, "name": claim},
            "local": {"path": str(layout.VOLUMES / name)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
        },
    }
