"""`wandistill submit`, `status`, `logs` and `delete` against the test's namespace, as typed, and from Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.kubectl import Kubectl
from wandistill.kube import cluster


def api(kubectl: Kubectl) -> cluster.Cluster:
    """The same for the Python API."""
    from kubernetes.client import BatchV1Api, CoreV1Api, CustomObjectsApi, NetworkingV1Api
    from kubernetes.config import new_client_from_config
    from kubernetes.watch import Watch

    made = new_client_from_config(str(kubectl.kubeconfig))
    groups = (group(made) for group in (CoreV1Api, CustomObjectsApi, NetworkingV1Api, BatchV1Api))
    return cluster.Cluster(kubectl.namespace, *groups, Watch)


@dataclass(frozen=True)
class Client:
    """The command line with a cluster's kubeconfig."""

    kubectl: Kubectl

    def run(self, command: str, *arguments: str, seconds: float = 120) -> str:
        """Standard output of a command that ends with 0."""
        done = subprocess.run(
            [sys.executable, "-m", "wandistill", command, *arguments, "--namespace", self.kubectl.namespace],
            env={**os.environ, "KUBECONFIG": str(self.kubectl.kubeconfig)},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, f"wandistill {command} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    def submit(self, values: dict[str, Any], preset: Path, folder: Path, name: str) -> str:
        """Submits a preset with values over it; returns the name of its one job."""
        file = folder / "values.yaml"
        file.write_text(json.dumps(values))
        (job,) = self.run("submit", "-f", str(preset), "-f", str(file), "--name", name).split()
        return job

    def status(self, job: str) -> dict[str, Any]:
        return json.loads(self.run("status", job, "--json"))
