"""The first process of the test cluster, in namespaces of its own: starts every part, buries orphans, ends with none.

Mounts, network, iptables rules and processes all live in this process's namespaces, so that when it is killed the
kernel takes them away, and nothing has to be found and undone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.local import layout, node
from tests.tools.build import tool

# The kubelet sets these where they differ, for the whole machine: it is shown the values that it wants instead.
SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
COREFILE = f"""\
.:53 {{
  bind {layout.BRIDGE_ADDRESS}
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {layout.KUBECONFIG} cluster
    pods insecure
    ttl 5
  }}
  cache 5
}}
"""


class StartError(RuntimeError):
    """A part of the cluster did not start."""


class Parts:
    """The cluster's processes by name."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen] = {}

    def start(self, name: str, command: list[str], **environment: str) -> None:
        with open(layout.LOGS / f"{name}.log", "ab") as log:
            self._running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **environment}
            )

    def wait_for(self, what: str, answers: Callable[[], bool], seconds: float = 120) -> None:
        """Waits until `answers()`; a part that ends meanwhile is an error with the end of its log."""
        deadline = time.monotonic() + seconds
        while not answers():
            for name, process in self._running.items():
                if process.poll() is not None:
                    raise StartError(f"{name} ended with {process.returncode} before {what}:\n{tail(name)}")
            if time.monotonic() > deadline:
                raise StartError(f"{what}: not within {seconds:.0f} s; see {layout.LOGS}")
            time.sleep(0.2)

    def bury(self) -> None:
        """Takes in every process that ends, for ever; a part's end is written down."""
        names = {process.pid: name for name, process in self._running.items()}
        while True:
            pid, status = os.wait()
            if pid in names:
                print(f"{names[pid]} ended with {os.waitstatus_to_exitcode(status)}", flush=True)


def main() -> None:
    try:
        parts = Parts()
        mount_own()
        network()
        control_plane(parts)
        for name in layout.NODES:
            start_node(parts, name)
        programs(parts)
        parts.wait_for("nodes are ready", nodes_ready)
        layout.READY.touch()
    except Exception as error:  # whatever it is, the log says it, and the one who waits reads the log
        print(f"{error}", flush=True)
        sys.exit(1)
    parts.bury()


def mount_own() -> None:
    """Own /run and own changes to /var; mounts of pods must reach the containers."""
    run("mount", "--make-rshared", "/")
    changes, work = layout.STATE / "var" / "changes", layout.STATE / "var" / "work"
    for folder in (changes, work):
        folder.mkdir(parents=True)
    run("mount", "-t", "overlay", "overlay", "-o", f"lowerdir=/var,upperdir={changes},workdir={work}", "/var")
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    shown = layout.STATE / "sysctl"
    for name, value in SYSCTLS.items():
        file = shown / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
        run("mount", "--bind", str(file), f"/proc/sys/{name}")


def network() -> None:
    """The bridge of the pods, and this end of the pair that the machine reaches the cluster by."""
    run("ip", "link", "set", "lo", "up")
    deadline = time.monotonic() + 30
    while not Path(f"/sys/class/net/{layout.INSIDE}").exists() and not link_exists(layout.INSIDE):
        if time.monotonic() > deadline:
            raise StartError(f"the interface {layout.INSIDE} did not come")
        time.sleep(0.1)
    run("ip", "addr", "add", f"{layout.INSIDE_ADDRESS}/30", "dev", layout.INSIDE)
    run("ip", "link", "set", layout.INSIDE, "up")
    run("ip", "link", "add", layout.BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{layout.BRIDGE_ADDRESS}/24", "dev", layout.BRIDGE)
    run("ip", "link", "set", layout.BRIDGE, "up")
    # etcd and kubelets look for a default route; nothing outside is reached by it.
    run("ip", "route", "add", "default", "via", layout.OUTSIDE_ADDRESS)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def control_plane(parts: Parts) -> None:
    etcd = layout.STATE / "etcd"
    parts.start(
        "etcd",
        [
            str(tool("etcd")),
            f"--data-dir={etcd}",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ],
    )
    key = layout.PKI / "sa.key"
    parts.start(
        "kube-apiserver",
        [
            str(tool("kube-apiserver")),
            "--etcd-servers=http://127.0.0.1:2379",
            f"--cert-dir={layout.PKI}",
            f"--secure-port={layout.API_PORT}",
            "--bind-address=0.0.0.0",
            f"--advertise-address={layout.BRIDGE_ADDRESS}",
            f"--service-cluster-ip-range={layout.SERVICE_NETWORK}",
            f"--token-auth-file={layout.PKI}/tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--kubelet-preferred-address-types=InternalIP",
            "--enable-aggregator-routing=true",
        ],
    )
    parts.wait_for("the API server is ready", lambda: kubectl("get", "--raw", "/readyz"))
    parts.start(
        "kube-controller-manager",
        [
            str(tool("kube-controller-manager")),
            f"--kubeconfig={layout.KUBECONFIG}",
            f"--service-account-private-key-file={key}",
            f"--root-ca-file={layout.PKI}/apiserver.crt",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
        ],
    )
    parts.start(
        "kube-scheduler",
        [
            str(tool("kube-scheduler")),
            f"--kubeconfig={layout.KUBECONFIG}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
        ],
    )


def start_node(parts: Parts, name: str) -> None:
    ctr = layout.ctr(name)
    parts.start(f"{name}-containerd", node.containerd_command(name), WANDISTILL_E2E_SHARE=node.shared_with_containers())
    parts.wait_for(f"containerd of {name} answers", lambda: quiet([*ctr, "version"]))
    for archive in sorted(layout.IMAGES.glob("*.tar")):
        run(*ctr, "images", "import", str(archive))
    command = node.kubelet_command(name)
    parts.start(f"{name}-kubelet", [str(tool("kubelet")), *command[1:]])


def programs(parts: Parts) -> None:
    """What runs once for both nodes, since they share one network namespace."""
    parts.start(
        "kube-proxy",
        [
            str(tool("kube-proxy")),
            f"--kubeconfig={layout.KUBECONFIG}",
            f"--hostname-override={layout.NODES[0]}",
            f"--cluster-cidr={layout.POD_NETWORK}",
            "--proxy-mode=iptables",
            "--conntrack-max-per-core=0",
        ],
    )
    corefile = layout.STATE / "Corefile"
    corefile.write_text(COREFILE)
    parts.start("coredns", [str(tool("coredns")), "-conf", str(corefile)])


def nodes_ready() -> bool:
    command = [str(tool("kubectl")), f"--kubeconfig={layout.KUBECONFIG}", "get", "nodes", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return False
    items = json.loads(done.stdout)["items"]
    ready = [
        item["metadata"]["name"]
        for item in items
        for condition in item.get("status", {}).get("conditions", [])
        if condition["type"] == "Ready" and condition["status"] == "True"
    ]
    return sorted(ready) == sorted(layout.NODES)


def kubectl(*arguments: str) -> bool:
    return quiet([str(tool("kubectl")), f"--kubeconfig={layout.KUBECONFIG}", *arguments])


def link_exists(name: str) -> bool:
    return quiet(["ip", "link", "show", name])


def quiet(command: list[str]) -> bool:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StartError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")


def tail(name: str, lines: int = 20) -> str:
    return "\n".join((layout.LOGS / f"{name}.log").read_text(errors="replace").splitlines()[-lines:])


if __name__ == "__main__":
    main()
