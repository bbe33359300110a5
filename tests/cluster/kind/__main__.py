"""A real Kubernetes where Docker or podman runs, by kind: `python -m tests.cluster.kind up` and `down`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster import command
from tests.cluster.local import layout
from tests.cluster.local.init import StartError
from tests.cluster.local.operator import install_operator
from tests.tools.build import tool

NAME = "wandistill-e2e"
CONFIG = Path(__file__).with_name("cluster.yaml")
STATE = layout.STATE.with_name("kind-cluster")
KUBECONFIG = STATE / "kubeconfig"
# Written when all is installed.
READY = STATE / "ready"
# As kind names them, and where both have the folder that claims of the tests share.
NODES = (f"{NAME}-control-plane", f"{NAME}-worker")
VOLUMES = Path("/volumes")
ENGINES = ("docker", "podman")


def engine() -> str | None:
    """The container engine that runs here, if one does."""
    for name in ENGINES:
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True).returncode == 0:
            return name
    return None


def up() -> None:
    """Builds the images, starts the cluster with them, and its training operator; does nothing where it runs.

    Raises:
        StartError: neither engine runs here, or a part did not start; the message says which and why.
    """
    name = engine()
    if name is None:
        found = [f"{each} is installed, but `{each} info` fails" for each in ENGINES if shutil.which(each)]
        raise StartError(
            f"kind needs Docker or podman, and neither runs here ({'; '.join(found) or 'neither is installed'}): start "
            "one. `make e2e` needs neither: it runs on the cluster of KUBECONFIG, or on one that it starts itself, on "
            "Linux as root."
        )
    if READY.exists() and NAME in _kind(name, "get", "clusters").split():
        return
    down()
    began = time.monotonic()
    (STATE / "volumes").mkdir(parents=True)
    repository, _, tag = layout.TRAIN_IMAGE.rpartition(":")
    _run([str(layout.CHECKOUT / "docker/build.sh")], {"IMAGE": repository, "TAG": tag})
    _kind(name, "create", "cluster", f"--name={NAME}", f"--config={CONFIG}", f"--kubeconfig={KUBECONFIG}")
    # podman's images reach kind by a file alone, and Docker's that way too.
    archive = STATE / "image.tar"
    for image in (layout.CONTROL_IMAGE, layout.TRAIN_IMAGE):
        _run([name, "save", f"--output={archive}", image])
        _kind(name, "load", "image-archive", f"--name={NAME}", str(archive))
        archive.unlink()
    install_operator(KUBECONFIG, STATE / "operator")
    READY.touch()
    print(f"cluster is up after {time.monotonic() - began:.0f} s: export KUBECONFIG={KUBECONFIG}")


def down() -> None:
    """Ends the cluster and removes what it made; images and the built kind stay."""
    name = engine()
    if name is not None:
        if NAME in _kind(name, "get", "clusters").split():
            # The pods' files are other users', which only the node's root may remove.
            _run([*inside(), "find", str(VOLUMES), "-mindepth", "1", "-delete"])
        _kind(name, "delete", "cluster", f"--name={NAME}")
    if STATE.exists():
        shutil.rmtree(STATE)


def inside() -> list[str]:
    """What makes a command one of a node's root."""
    return [engine() or ENGINES[0], "exec", NODES[0]]


def _kind(name: str, *arguments: str) -> str:
    folder = STATE if STATE.exists() else None
    return _run([str(tool("kind")), *arguments], {"KIND_EXPERIMENTAL_PROVIDER": name}, folder)


def _run(command: list[str], environment: dict[str, str] | None = None, folder: Path | None = None) -> str:
    whole = {**os.environ, **(environment or {})}
    done = subprocess.run(command, cwd=folder, env=whole, capture_output=True, text=True)
    if done.returncode:
        raise StartError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


def main() -> int:
    return command.run(__doc__, {"up": up, "down": down})


if __name__ == "__main__":
    sys.exit(main())
