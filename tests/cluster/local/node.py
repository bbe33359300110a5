"""The files of one node of the test cluster: containerd, its network plugin, kubelet."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

from tests.cluster.local import layout


def write_node(node: str) -> None:
    """Writes the node's settings below its own folder; nothing of two nodes is shared but the bridge."""
    folder = layout.node_dir(node)
    for name in ("cni", "ipam", "kubelet", "manifests"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "resolv.conf").write_text("")
    registry = folder / "registries" / layout.REGISTRY
    registry.mkdir(parents=True, exist_ok=True)
    # Its `server` alone is no valid file to containerd 1.6.
    (registry / "hosts.toml").write_text(f'[host."http://{layout.REGISTRY}"]\n')
    (folder / "cni" / "10-bridge.conflist").write_text(json.dumps(_network(node)))
    (folder / "containerd.toml").write_text(_containerd(folder))
    (folder / "kubelet.json").write_text(json.dumps(_kubelet(node, folder)))
    runc = folder / "runc"
    runc.write_text(f'#!/bin/sh\nexec {sys.executable} -I {Path(__file__).with_name("runc.py")} "$@"\n')
    runc.chmod(runc.stat().st_mode | stat.S_IXUSR)


def containerd_command(node: str) -> list[str]:
    return ["containerd", "--config", str(layout.node_dir(node) / "containerd.toml")]


def kubelet_command(node: str) -> list[str]:
    folder = layout.node_dir(node)
    return [
        "kubelet",
        f"--config={folder}/kubelet.json",
        f"--kubeconfig={layout.KUBECONFIG}",
        f"--hostname-override={node}",
        f"--node-ip={layout.BRIDGE_ADDRESS}",
        f"--node-labels=wandistill.test/node={node}",
        f"--root-dir={folder}/kubelet",
        f"--cert-dir={folder}/kubelet/pki",
    ]


def shared_with_containers() -> str:
    """What `runc.py` reads: the mark, and the machine's folders by where a container sees them."""
    paths = {"/usr": "/usr", layout.CHECKOUT_INSIDE: str(layout.CHECKOUT)}
    # The environment's interpreter, where it isn't the system's.
    base = str(Path(sys.base_prefix).resolve())
    if not base.startswith("/usr"):
        paths[base] = base
    return json.dumps({"mark": layout.SHARED_MARK, "paths": paths})


def _network(node: str) -> dict:
    first, last = layout.POD_RANGES[node]
    pods = {"subnet": layout.POD_NETWORK, "rangeStart": first, "rangeEnd": last, "gateway": layout.BRIDGE_ADDRESS}
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": layout.BRIDGE,
                "isGateway": True,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": str(layout.node_dir(node) / "ipam"),
                    "ranges": [[pods]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }


def _containerd(folder: Path) -> str:
    # restrict_oom_score_adj: without CAP_SYS_RESOURCE runc may not lower the score, and no pod would start.
    return f"""\
version = 2
root = "{folder}/containerd"
state = "/run/wandistill-{folder.name}"
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{layout.PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{folder}/registries"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = "{folder}/runc"
"""


def _kubelet(node: str, folder: Path) -> dict:
    number = layout.NODES.index(node)
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "port": 10250 + 10 * number,
        "healthzPort": 10248 + 10 * number,
        "readOnlyPort": 0,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.CGROUP}/{node}",
        "failSwapOn": False,
        "failCgroupV1": False,
        "clusterDNS": [layout.BRIDGE_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": f"{folder}/resolv.conf",
        "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
        "staticPodPath": f"{folder}/manifests",
        # Each kubelet removes logs of pods that it doesn't know, so they can't share /var/log/pods.
        "podLogsDir": f"{folder}/pod-logs",
        "evictionHard": {"memory.available": "100Mi"},
        "imageGCHighThresholdPercent": 100,
        "syncFrequency": "10s",
    }
