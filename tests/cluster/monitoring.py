"""The chart's monitoring release beside a Prometheus, and the pod that plays a run on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.chart import Release
from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.manifests import POD_SECURITY, SECURITY, config_map
from tests.cluster.prometheus import INTERVAL, LABELS
from tests.metrics import replay
from tests.metrics.prometheus import Prometheus

RECORDED = Path(replay.__file__).with_name("recorded")
# How a release is found by the Prometheus operator, and how without it.
BY_OPERATOR = {"podMonitor": {"enabled": True, "additionalLabels": LABELS, "interval": INTERVAL}}
BY_ANNOTATIONS = {"podMonitor": {"enabled": False}, "annotations": True}
RULES = {"prometheusRule": {"enabled": True, "additionalLabels": LABELS}}
# As the exporter counts it, and Prometheus names it.
GPU_RUN = "recorded-on-gpu"
PORT = 9400


@dataclass(frozen=True)
class Monitoring:
    """The release, its namespace, and the Prometheus that scrapes it."""

    cluster: Cluster
    kubectl: Kubectl
    release: Release
    prometheus: Prometheus

    @classmethod
    def install(cls, cluster: Cluster, kubectl: Kubectl, server: Prometheus) -> Monitoring:
        release = Release(cluster, kubectl, "monitoring")
        release.install_without_job("monitoring", exporter={"clusterWide": True}, metrics={**BY_OPERATOR, **RULES})
        if records():
            kubectl.apply(*replaying(cluster.control_image))
        return cls(cluster, kubectl, release, server)

    def by_annotations(self) -> None:
        """Has the exporter found by its annotations from now on; its pod is a new one then."""
        values = {"exporter": {"clusterWide": True}, "metrics": {**BY_ANNOTATIONS, **RULES}}
        self.release.upgrade("monitoring", **values)
        self.kubectl.run("rollout", "status", "deployment/monitoring-exporter", "--timeout=100s")

    def exporter_pod(self) -> str:
        """The exporter's pod that is not on its way out."""
        found = self.kubectl.items("pods", "-l", "app.kubernetes.io/component=exporter")
        (name,) = [pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return name


def records() -> list[Path]:
    """Snapshots that ranks wrote on a real GPU run; see tests/metrics/recorded."""
    return sorted(RECORDED.glob("*.json"))


def replaying(image: str) -> list[dict[str, Any]]:
    """A pod that tells what the ranks of a run on a GPU told, as a pod of a PyTorchJob of its own."""
    labels = {
        "training.kubeflow.org/job-name": GPU_RUN,
        "training.kubeflow.org/replica-type": "master",
        "training.kubeflow.org/replica-index": "0",
        "wandistill.dev/pool": "gpu",
    }
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(PORT)}
    files = {path.name: path.read_text() for path in records()}
    script = Path(replay.__file__).read_text()
    command = ["python", "/replay/replay.py", "/recorded", "/tmp/told", GPU_RUN, "gpu", str(PORT)]
    container = {
        "name": "pytorch",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "resources": {"requests": {"cpu": "50m", "memory": "100Mi"}},
        "securityContext": SECURITY,
        "volumeMounts": [
            {"name": "recorded", "mountPath": "/recorded"},
            {"name": "replay", "mountPath": "/replay"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    volumes = [
        *({"name": name, "configMap": {"name": name}} for name in ("recorded", "replay")),
        {"name": "tmp", "emptyDir": {}},
    ]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": GPU_RUN, "labels": labels, "annotations": annotations},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "securityContext": POD_SECURITY,
            "containers": [container],
            "volumes": volumes,
        },
    }
    return [config_map("recorded", **files), config_map("replay", **{"replay.py": script}), pod]
