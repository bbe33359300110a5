"""Where the test cluster keeps its files, its addresses and names."""

from __future__ import annotations

import os
from pathlib import Path

from tests.tools.build import cache_dir

CHECKOUT = Path(__file__).resolve().parents[3]
# Removed whole by `down`, so it is never the named folder itself.
STATE = Path(os.environ.get("WANDISTILL_E2E_STATE") or cache_dir()) / "local-cluster"

KUBECONFIG = STATE / "kubeconfig"
PID = STATE / "init.pid"  # the cluster's first process; with it end all others
READY = STATE / "ready"
LOGS = STATE / "log"
PKI = STATE / "pki"
IMAGES = STATE / "images"
VOLUMES = STATE / "volumes"

NODES = ("node-1", "node-2")
BRIDGE, BRIDGE_ADDRESS, POD_NETWORK = "wde2e", "10.89.0.1", "10.89.0.0/24"
POD_RANGES = {"node-1": ("10.89.0.10", "10.89.0.119"), "node-2": ("10.89.0.120", "10.89.0.229")}
SERVICE_NETWORK = "10.96.0.0/16"
# A pair of interfaces joins this machine with the cluster's network namespace.
OUTSIDE, OUTSIDE_ADDRESS = "wde2e-out", "10.88.255.1"
INSIDE, INSIDE_ADDRESS = "wde2e-in", "10.88.255.2"
API_PORT = 6443
# Where nodes look for a registry on this machine, without TLS; a test that wants one starts it.
REGISTRY = f"{OUTSIDE_ADDRESS}:5000"

CGROUP = "wandistill-e2e"

# The images that `images.py` makes; the tests and the operator's manifest name them.
PAUSE_IMAGE = "localhost/wandistill-pause:e2e"
OPERATOR_IMAGE = "localhost/wandistill-training-operator:e2e"
TRAIN_IMAGE = "localhost/wandistill:e2e"
KUEUE_IMAGE = "localhost/wandistill-kueue:e2e"
PROMETHEUS_IMAGE = "localhost/wandistill-prometheus:e2e"
CONTROL_IMAGE = "localhost/wandistill-control:e2e"
# No node has it: it is pulled from the registry.
PUSHED_IMAGE = f"{REGISTRY}/wandistill:e2e"
# A container of an image with this variable gets the machine's /usr and the checkout, read-only (see `runc.py`).
SHARED_MARK = "WANDISTILL_E2E_SHARED"
# Not at its own path: a checkout below /tmp would be hidden by the pods' volume at /tmp.
CHECKOUT_INSIDE = "/opt/e2e/checkout"


def node_dir(node: str) -> Path:
    return STATE / node


def ctr(node: str, namespace: str = "k8s.io") -> list[str]:
    """What makes a command one to a node's containerd; the kubelet sees the images of its own namespace there."""
    return ["ctr", "--address", str(node_dir(node) / "containerd.sock"), "--namespace", namespace]
