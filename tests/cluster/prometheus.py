"""A Prometheus that its operator runs on the test cluster: it scrapes what the chart's objects and annotations say."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.clusters import Cluster
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.cluster.local import layout
from tests.cluster.local.images import load
from tests.metrics.prometheus import Prometheus
from tests.tools.build import prometheus_crds, tool

NAME = "wandistill-e2e"
GROUP = "monitoring.coreos.com"
KINDS = ("podmonitors", "probes", "prometheuses", "prometheusrules", "servicemonitors")
# By these the chart's monitors and rules are selected, as kube-prometheus-stack does.
LABELS = {"release": NAME}
INTERVAL = "2s"
# Only what carries this is the tests' operator's business, and nobody else's.
OWNER = {"operator.prometheus.io/controller-id": NAME}
PROGRAMS = {"bin/prometheus": "prometheus", "bin/prometheus-config-reloader": "prometheus-config-reloader"}
PORT = 9090
READER = [
    {"apiGroups": [""], "resources": ["pods", "services", "endpoints"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
]
_META = "__meta_kubernetes_pod"
# The job kubernetes-pods of the community's chart.
BY_ANNOTATIONS = {
    "job_name": "by-annotations",
    "honor_labels": True,
    "scrape_interval": INTERVAL,
    "scrape_timeout": INTERVAL,
    "kubernetes_sd_configs": [{"role": "pod"}],
    "relabel_configs": [
        {"source_labels": [f"{_META}_annotation_prometheus_io_scrape"], "action": "keep", "regex": "true"},
        {
            "source_labels": [f"{_META}_annotation_prometheus_io_path"],
            "target_label": "__metrics_path__",
            "regex": "(.+)",
        },
        {
            "source_labels": [f"{_META}_ip", f"{_META}_annotation_prometheus_io_port"],
            "target_label": "__address__",
            "regex": "(.+);(.+)",
            "replacement": "$1:$2",
        },
        {"source_labels": [f"{_META}_phase"], "action": "drop", "regex": "Pending|Succeeded|Failed"},
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": [f"{_META}_name"], "target_label": "pod"},
    ],
}


@contextmanager
def prometheus(cluster: Cluster, kubectl: Kubectl, folder: Path) -> Iterator[Prometheus]:
    """Within the body a Prometheus is there, or soon will be, in kubectl's namespace; it looks at all namespaces.

    Args:
        folder: where the operator's log and the image are written.
    """
    if cluster.local:
        load(folder, layout.PROMETHEUS_IMAGE, PROGRAMS)
    whole = Kubectl(cluster.kubeconfig, namespace="")
    made = define(whole)
    kubectl.apply(*objects(kubectl.namespace, cluster.local))
    command = [
        str(tool("prometheus-operator")),
        f"--controller-id={NAME}",
        "--web.listen-address=127.0.0.1:0",
        *(f"--config-reloader-{what}=0" for what in ("cpu-request", "cpu-limit", "memory-request", "memory-limit")),
        *([f"--prometheus-config-reloader={layout.PROMETHEUS_IMAGE}"] if cluster.local else []),
    ]
    own = {**os.environ, "KUBECONFIG": str(kubectl.kubeconfig)}
    try:
        with open(folder / "operator.log", "wb") as log:
            operator = subprocess.Popen(command, env=own, stdout=log, stderr=log)
        try:
            with proxy(kubectl) as address:
                path = f"api/v1/namespaces/{kubectl.namespace}/pods/prometheus-{NAME}-0:{PORT}/proxy"
                yield Prometheus(f"{address}/{path}")
        finally:
            operator.terminate()
            operator.wait(timeout=30)
    finally:
        for kind in ("clusterrolebinding", "clusterrole"):
            whole.run("delete", kind, NAME, "--ignore-not-found")
        if made:
            whole.run("delete", "crd", *made, "--ignore-not-found", "--timeout=100s")


def define(kubectl: Kubectl) -> list[str]:
    """Defines the operator's kinds where the cluster does not have them; returns which ones it defined."""
    try:
        kubectl.run("get", "crd", f"prometheuses.{GROUP}")
        return []
    except KubectlError:
        names = [f"{kind}.{GROUP}" for kind in KINDS]
    # Server-side: they are too large for the annotation of client-side apply.
    files = [f"--filename={prometheus_crds() / f'{GROUP}_{kind}.yaml'}" for kind in KINDS]
    kubectl.run("apply", "--server-side", *files)
    # An operator that does not find them does nothing, for ever.
    kubectl.run("wait", "--for=condition=Established", "--timeout=60s", *(f"crd/{name}" for name in names))
    return names


@contextmanager
def proxy(kubectl: Kubectl) -> Iterator[str]:
    """The address of a proxy to the API server, which reaches every pod."""
    command = [str(tool("kubectl")), f"--kubeconfig={kubectl.kubeconfig}", "proxy", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            (port,) = re.findall(r":(\d+)$", process.stdout.readline().strip())
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def objects(namespace: str, local: bool) -> list[dict[str, Any]]:
    """A Prometheus with its rights and the job that goes by annotations."""
    everywhere: dict[str, Any] = {}
    spec = {
        **({"image": layout.PROMETHEUS_IMAGE, "imagePullPolicy": "IfNotPresent"} if local else {}),
        "serviceAccountName": NAME,
        "podMonitorSelector": {"matchLabels": LABELS},
        "podMonitorNamespaceSelector": everywhere,
        "ruleSelector": {"matchLabels": LABELS},
        "ruleNamespaceSelector": everywhere,
        "additionalScrapeConfigs": {"name": NAME, "key": "scrape.yaml"},
        "scrapeInterval": INTERVAL,
        "evaluationInterval": INTERVAL,
        "resources": {"requests": {"cpu": "100m", "memory": "200Mi"}},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    account = {"kind": "ServiceAccount", "name": NAME, "namespace": namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": NAME}
    rbac = "rbac.authorization.k8s.io/v1"
    return [
        _object("v1", "ServiceAccount"),
        _object("v1", "Secret", stringData={"scrape.yaml": json.dumps([BY_ANNOTATIONS])}),
        _object(rbac, "ClusterRole", rules=READER),
        _object(rbac, "ClusterRoleBinding", roleRef=role, subjects=[account]),
        _object(f"{GROUP}/v1", "Prometheus", OWNER, spec=spec),
    ]


def _object(version: str, kind: str, annotations: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": NAME, **({"annotations": annotations} if annotations else {})}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}
