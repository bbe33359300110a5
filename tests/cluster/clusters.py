"""Which cluster the tests run on: that of $KUBECONFIG, one of kind where a container engine runs, or plain binaries.

`python -m tests.cluster.clusters up` starts the one that is not the user's own, and `down` ends it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import command
from tests.cluster.kind import __main__ as kind
from tests.cluster.kubectl import Kubectl
from tests.cluster.local import __main__ as binaries
from tests.cluster.local import layout

# The claims that tests make: each namespace has a volume for each, and takes no other's.
CLAIMS = ("output", "demo-output", "shared", "distil-cpu-demo-output")
# What a cluster of the user's own has to say beside its kubeconfig.
SETTINGS = ("WANDISTILL_E2E_TRAIN_IMAGE", "WANDISTILL_E2E_CONTROL_IMAGE", "WANDISTILL_E2E_STORAGE_CLASS")


@dataclass(frozen=True)
class Shared:
    """A folder that all nodes of a cluster have."""

    folder: Path  # as the nodes see it
    nodes: Sequence[str]
    inside: Sequence[str] = ()  # before a command that looks into it

    def run(self, *command: str) -> None:
        subprocess.run([*self.inside, *command], check=True, capture_output=True)


@dataclass(frozen=True)
class Cluster:
    """What a test has to know of its cluster."""

    kubeconfig: Path
    train_image: str
    control_image: str
    storage_class: str
    local: bool = False  # of plain binaries on this machine
    shared: Shared | None = None  # what claims are made of, where no provisioner makes them

    def make_volumes(self, kubectl: Kubectl) -> None:
        """Volumes for the namespace's claims, in a folder that pods of all nodes share."""
        if self.shared is not None:
            kubectl.apply(storage_class(self.storage_class))
            self.shared.run("mkdir", "-p", *(str(self.shared.folder / name) for name in volume_names(kubectl)))
            made = (volume(kubectl.namespace, claim, self.storage_class, self.shared) for claim in CLAIMS)
            kubectl.apply(*made)

    def remove_volumes(self, kubectl: Kubectl) -> None:
        if self.shared is not None:
            kubectl.run("delete", "pv", *volume_names(kubectl), "--ignore-not-found")
            self.shared.run("rm", "-rf", *(str(self.shared.folder / name) for name in volume_names(kubectl)))


def current() -> Cluster:
    """The cluster to test on; without $KUBECONFIG one that is started if it doesn't run.

    Raises:
        StartError: it did not start.
        ValueError: $KUBECONFIG names a cluster, but not which images and storage class it has.
    """
    kubeconfig = os.environ.get("KUBECONFIG", "")
    if kubeconfig not in ("", str(layout.KUBECONFIG), str(kind.KUBECONFIG)):
        if missing := [name for name in SETTINGS if not os.environ.get(name)]:
            raise ValueError(
                f"KUBECONFIG is {kubeconfig}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: "
                f"name the images that this cluster can pull and a storage class with ReadWriteMany."
            )
        return Cluster(Path(kubeconfig), *(os.environ[name] for name in SETTINGS))
    images = (layout.TRAIN_IMAGE, layout.CONTROL_IMAGE)
    if kind.engine() and kubeconfig != str(layout.KUBECONFIG):
        kind.up()
        shared = Shared(kind.VOLUMES, kind.NODES, kind.inside())
        return Cluster(kind.KUBECONFIG, *images, "shared", shared=shared)
    binaries.up()
    return Cluster(layout.KUBECONFIG, *images, "shared", local=True, shared=Shared(layout.VOLUMES, layout.NODES))


def down() -> None:
    """Ends what was started here, of both kinds."""
    kind.down()
    if shutil.which("ip"):  # else the other has not run here
        binaries.down()


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


def volume(namespace: str, claim: str, storage: str, shared: Shared) -> dict:
    """A volume of type `local` and not hostPath: the kubelet gives it to the pod's fsGroup, as on a real share."""
    name = f"{namespace}-{claim}"
    terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": list(shared.nodes)}]}]
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
            "local": {"path": str(shared.folder / name)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
        },
    }


def main() -> int:
    return command.run(__doc__, {"up": current, "down": down}, ValueError)


if __name__ == "__main__":
    sys.exit(main())
