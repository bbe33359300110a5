"""Installs the training operator from its own manifests, with the project's patch of its init container."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.cluster.local import layout
from tests.cluster.local.init import StartError
from tests.tools.build import operator_manifests, tool

# The probes' first look comes after 10 s by default: here the deployment is ready as soon as it answers.
PROBE = {"initialDelaySeconds": 1, "periodSeconds": 2}
CONTAINER = "/spec/template/spec/containers/0"
# By default it asks so slowly that the pods of 200 jobs take four minutes to be made, and here half a minute.
PACE = ("--kube-api-qps=500", "--kube-api-burst=1000", "--controller-threads=8")


def install_operator(kubeconfig: Path, folder: Path, image: str | None = None) -> None:
    """Applies the manifests and waits until the operator answers.

    Args:
        kubeconfig: the cluster's.
        folder: where the kustomization is written.
        image: of the operator, in place of its manifests' own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    patch = [
        *([{"op": "replace", "path": f"{CONTAINER}/image", "value": image}] if image else []),
        {
            "op": "replace",
            "path": f"{CONTAINER}/args/0",
            "value": f"--pytorch-init-container-image={layout.CONTROL_IMAGE}",
        },
        *({"op": "add", "path": f"{CONTAINER}/args/-", "value": flag} for flag in PACE),
        *({"op": "add", "path": f"{CONTAINER}/readinessProbe/{key}", "value": value} for key, value in PROBE.items()),
    ]
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(operator_manifests() / "overlays" / "standalone", folder.resolve())],
        "components": [os.path.relpath(layout.CHECKOUT / "k8s" / "operator", folder.resolve())],
        "patches": [{"target": {"kind": "Deployment", "name": "training-operator"}, "patch": json.dumps(patch)}],
    }
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization))
    kubectl = [str(tool("kubectl")), f"--kubeconfig={kubeconfig}"]
    # Server-side: the CRD is too large for the annotation of client-side apply.
    _run([*kubectl, "apply", "--server-side", "-k", str(folder)])
    _run([*kubectl, "-n", "kubeflow", "rollout", "status", "deployment/training-operator", "--timeout=180s"])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StartError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
