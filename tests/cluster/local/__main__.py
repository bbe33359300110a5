"""A real Kubernetes on one Linux machine, without Docker: `python -m tests.cluster.local up` and `down`."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.cluster import command
from tests.cluster.local import layout
from tests.cluster.local.cgroups import hierarchies, make_cgroups, remove_cgroups
from tests.cluster.local.images import write_images
from tests.cluster.local.init import StartError, run, tail
from tests.cluster.local.node import write_node
from tests.cluster.local.operator import install_operator
from tests.tools import build as tools
from tests.tools.build import tool

PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "ip": "iproute2",
    "openssl": "openssl",
    "unshare": "util-linux",
}
NEEDS = (
    "The cluster of plain binaries needs root that may make namespaces, mounts and cgroups, as in a virtual machine or "
    "in a privileged container. Else set KUBECONFIG to a cluster of your own."
)
UNSHARE = ("unshare", "--fork", "--pid", "--mount", "--net", "--mount-proc")
# The others of the tests' tools run beside a cluster, or are given to one by the tests that want them.
MODULES = ("kubernetes", "operator", "etcd", "coredns", "pause")
PROGRAMS = tuple(name for name, (folder, *_) in tools.PROGRAMS.items() if folder in MODULES)


def up() -> None:
    """Starts the cluster and its training operator; does nothing where it runs.

    Raises:
        StartError: this machine can't carry it, or a part did not start; the message has the end of its log.
    """
    if running():
        return
    check_machine()
    for name in PROGRAMS:
        tool(name)
    down()
    began = time.monotonic()
    for folder in (layout.LOGS, layout.PKI, layout.VOLUMES):
        folder.mkdir(parents=True)
    write_images(layout.IMAGES)
    for name in layout.NODES:
        write_node(name)
    write_access()
    make_cgroups()
    start()
    install_operator(layout.KUBECONFIG, layout.STATE / "operator", layout.OPERATOR_IMAGE)
    print(f"cluster is up after {time.monotonic() - began:.0f} s: export KUBECONFIG={layout.KUBECONFIG}")


def check_machine() -> None:
    if os.geteuid() != 0:
        raise StartError(f"This is not root. {NEEDS}")
    missing = sorted({package for program, package in PACKAGES.items() if shutil.which(program) is None})
    if missing:
        raise StartError(f"Packages are missing: apt-get install -y --no-install-recommends {' '.join(missing)}")
    if Path("/var") in layout.STATE.parents:
        raise StartError(f"{layout.STATE} lies below /var, which the cluster overlays; set WANDISTILL_E2E_STATE.")


def write_access() -> None:
    """The service accounts' key, one administrator's token, and the kubeconfig that carries it."""
    run("openssl", "genrsa", "-out", f"{layout.PKI}/sa.key", "2048")
    token = secrets.token_hex(16)
    (layout.PKI / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    server = f"https://{layout.BRIDGE_ADDRESS}:{layout.API_PORT}"
    layout.KUBECONFIG.touch(mode=0o600)
    layout.KUBECONFIG.write_text(
        f"""\
apiVersion: v1
kind: Config
clusters: [{{name: cluster, cluster: {{server: "{server}", certificate-authority: {layout.PKI}/apiserver.crt}}}}]
users: [{{name: admin, user: {{token: {token}}}}}]
contexts: [{{name: cluster, context: {{cluster: cluster, user: admin}}}}]
current-context: cluster
"""
    )


def start() -> None:
    """Starts the first process in new namespaces and joins its network with this machine's."""
    with open(layout.LOGS / "init.log", "ab") as log:
        outer = subprocess.Popen(
            [*UNSHARE, sys.executable, "-m", "tests.cluster.local.init"],
            cwd=layout.CHECKOUT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    first = _child(outer)
    layout.PID.write_text(f"{first}\n")
    run("ip", "link", "add", layout.OUTSIDE, "type", "veth", "peer", "name", layout.INSIDE, "netns", str(first))
    run("ip", "addr", "add", f"{layout.OUTSIDE_ADDRESS}/30", "dev", layout.OUTSIDE)
    run("ip", "link", "set", layout.OUTSIDE, "up")
    run("ip", "route", "add", layout.POD_NETWORK, "via", layout.INSIDE_ADDRESS)
    deadline = time.monotonic() + 300
    while not layout.READY.exists():
        if outer.poll() is not None or time.monotonic() > deadline:
            raise StartError(f"The cluster did not start; logs are in {layout.LOGS}.\n{tail('init')}")
        time.sleep(0.2)


def _child(outer: subprocess.Popen) -> int:
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    deadline = time.monotonic() + 30
    while not (pids := children.read_text().split()):
        if outer.poll() is not None or time.monotonic() > deadline:
            raise StartError(f"New namespaces could not be made. {NEEDS}\n{tail('init')}")
        time.sleep(0.05)
    return int(pids[0])


def down() -> None:
    """Ends the cluster and removes everything that it made. The built programs stay in their cache."""
    if layout.PID.exists():
        pid = int(layout.PID.read_text())
        if _is_ours(pid):
            os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while _is_ours(pid):
                if time.monotonic() > deadline:
                    raise StartError(f"Process {pid} does not end.")
                time.sleep(0.1)
    subprocess.run(["ip", "link", "del", layout.OUTSIDE], capture_output=True)
    remove_cgroups()
    if layout.STATE.exists():
        shutil.rmtree(layout.STATE)
    if left := traces():
        raise StartError(f"The cluster has ended, but it left {', '.join(left)}.")


def traces() -> list[str]:
    """What is on this machine of the cluster beside the built programs: processes, mounts, the interface, cgroups."""
    found = [str(path) for path in (layout.STATE, Path("/sys/class/net", layout.OUTSIDE)) if path.exists()]
    found += [str(path / layout.CGROUP) for path in hierarchies("cgroup", "cgroup2") if (path / layout.CGROUP).exists()]
    mounts = Path("/proc/mounts").read_text().splitlines()
    found += [f"the mount {line.split()[1]}" for line in mounts if str(layout.STATE) in line]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may end meanwhile
            if str(layout.STATE).encode() in (process / "cmdline").read_bytes():
                found.append(f"process {process.name}")
    return found


def running() -> bool:
    return layout.READY.exists() and layout.PID.exists() and _is_ours(int(layout.PID.read_text()))


def _is_ours(pid: int) -> bool:
    try:
        return b"tests.cluster.local.init" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def main() -> int:
    return command.run(__doc__, {"up": up, "down": down, "kubeconfig": lambda: print(layout.KUBECONFIG)})


if __name__ == "__main__":
    sys.exit(main())
