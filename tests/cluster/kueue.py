"""Kueue on the test cluster for a while, with one queue, whose quota is a number of pods."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl, KubectlError, wait_until
from tests.cluster.local import layout
from tests.cluster.local.images import load
from tests.tools.build import kueue_manifests

NAME = "wandistill-e2e"
GROUP, VERSION = "kueue.x-k8s.io", "v1beta2"
OPERATOR = {"kind": "Deployment", "name": "kueue-controller-manager"}
BUILT_FOR = "us-central1-docker.pkg.dev/k8s-staging-images/kueue/kueue"
# What clusters pull that are not of plain binaries; the version of tests/tools/kueue/go.mod.
PUBLIC_IMAGE = "registry.k8s.io/kueue/kueue:v0.17.0"
# More of everything that pods ask for than there is.
PLENTY = {"cpu": "1000", "memory": "100Ti", "ephemeral-storage": "100Ti"}


@contextmanager
def kueue(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Kueue is there within the body, and looks after PyTorchJobs alone.

    Args:
        folder: where its kustomization is written.
    """
    kubectl = Kubectl(cluster.kubeconfig, namespace="")
    if cluster.local:
        load(folder, layout.KUEUE_IMAGE, {"manager": "kueue"})
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization(folder, cluster.local)))
    kubectl.run("apply", "--server-side", "-k", str(folder))
    try:
        name = f"deployment/{OPERATOR['name']}"
        kubectl.run("rollout", "status", name, "-n", "kueue-system", "--timeout=180s", seconds=190)
        yield
    finally:
        # Before its controller, which takes the finalizers off.
        for kind in ("clusterqueue", "resourceflavor"):
            kubectl.run("delete", f"{kind}.{GROUP}", NAME, "--ignore-not-found", "--timeout=60s")
        kubectl.run("delete", "-k", str(folder), "--ignore-not-found", "--timeout=100s")


def kustomization(folder: Path, local: bool) -> dict[str, Any]:
    """Kueue's own manifests with this image and PyTorchJobs alone, without the API of its queues' order.

    That API's server would have to be told whom to trust by the API server, and a namespace cannot be removed while an
    API does not answer.
    """
    image, tag = (layout.KUEUE_IMAGE if local else PUBLIC_IMAGE).rsplit(":", 1)
    settings = {
        "apiVersion": f"config.kueue.x-k8s.io/{VERSION}",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": ":8081"},
        "metrics": {"bindAddress": ":8443"},
        "webhook": {"port": 9443},
        "leaderElection": {"leaderElect": False},
        "integrations": {"frameworks": ["kubeflow.org/pytorchjob"]},
    }
    container = "/spec/template/spec/containers/0"
    deployment = [
        {"op": "replace", "path": f"{container}/imagePullPolicy", "value": "IfNotPresent"},
        {"op": "add", "path": f"{container}/args/-", "value": "--feature-gates=VisibilityOnDemand=false"},
    ]
    config = [{"op": "replace", "path": "/data/controller_manager_config.yaml", "value": json.dumps(settings)}]
    unwanted = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": "any"},
        "$patch": "delete",
    }
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(kueue_manifests() / "default", folder.resolve())],
        "images": [{"name": BUILT_FOR, "newName": image, "newTag": tag}],
        "patches": [
            {"target": OPERATOR, "patch": json.dumps(deployment)},
            {"target": {"kind": "ConfigMap", "name": "kueue-manager-config"}, "patch": json.dumps(config)},
            {"target": {"kind": "APIService"}, "patch": json.dumps(unwanted)},
        ],
    }


def make_queue(namespace: Kubectl, pods: int) -> str:
    """A queue in the namespace that lets so many pods run at a time; returns its name."""
    quotas = PLENTY | {"pods": str(pods)}
    resources = [{"name": name, "nominalQuota": quota} for name, quota in quotas.items()]
    group = {"coveredResources": list(quotas), "flavors": [{"name": NAME, "resources": resources}]}
    made = (
        _object("ResourceFlavor", {}),
        _object("ClusterQueue", {"namespaceSelector": {}, "resourceGroups": [group]}),
        _object("LocalQueue", {"clusterQueue": NAME}),
    )

    def applied() -> bool:
        # Ready is said a moment before its certificates have reached the API server.
        try:
            namespace.apply(*made)
        except KubectlError as error:
            if "failed calling webhook" in str(error):
                return False
            raise
        return True

    wait_until(applied, 60, "Kueue's webhook to answer", every=1)
    return NAME


def _object(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, "metadata": {"name": NAME}, "spec": spec}
