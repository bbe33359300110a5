"""The test cluster's images, written without a builder: a few files each, and the checkout shared with the machine."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.local import layout
from tests.cluster.local.init import run
from tests.tools.build import tool

USER = "65532:65532"
PASSWD = "root:x:0:0:root:/root:/bin/sh\nwandistill:x:65532:65532::/tmp:/bin/sh\n"
GROUP = "root:x:0:\nwandistill:x:65532:\n"
# The operator's init container asks busybox's nslookup for the Master; getent answers for any search domain.
NSLOOKUP = '#!/bin/sh\nexec getent hosts "$1"\n'
WANDISTILL = '#!/bin/sh\nexec python -m wandistill "$@"\n'


def write_images(folder: Path) -> list[Path]:
    """Writes every image as an archive that `ctr images import` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = _shared_files()
    pause = [_file("pause", tool("pause").read_bytes(), 0o755)]
    return [
        _write(folder / "pause.tar", layout.PAUSE_IMAGE, pause, {"Entrypoint": ["/pause"], "User": USER}),
        _write(
            folder / "operator.tar",
            layout.OPERATOR_IMAGE,
            [_file("manager", tool("training-operator").read_bytes(), 0o755), _folder("tmp", 0o1777)],
            {"Entrypoint": ["/manager"], "User": USER},
        ),
        _write(folder / "train.tar", layout.TRAIN_IMAGE, shared, _launch()),
        _write(folder / "control.tar", layout.CONTROL_IMAGE, shared, _launch()),
    ]


def push_trainer(folder: Path) -> None:
    """Gives the trainer's image to the registry of this machine, and to no node."""
    folder.mkdir(parents=True, exist_ok=True)
    # A file more, so that no node has its layer already.
    archive = _write(folder / "pushed.tar", layout.PUSHED_IMAGE, [*_shared_files(), _file("pushed", b"")], _launch())
    ctr = layout.ctr(layout.NODES[0], namespace="pushed")
    run(*ctr, "images", "import", str(archive))
    run(*ctr, "images", "push", "--plain-http", layout.PUSHED_IMAGE)
    run(*ctr, "images", "rm", "--sync", layout.PUSHED_IMAGE)
    archive.unlink()


def load(folder: Path, image: str, programs: Mapping[str, str]) -> None:
    """Writes an image of some programs and gives it to the nodes of the running cluster: few tests want it.

    Args:
        folder: where it lies until then.
        programs: path in the image -> name among the tests' tools; the image runs the first one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [_file(path, tool(program).read_bytes(), 0o755) for path, program in programs.items()]
    first = {"Entrypoint": [f"/{next(iter(programs))}"], "User": USER}
    archive = _write(folder / "image.tar", image, [*files, _folder("tmp", 0o1777)], first)
    for node in layout.NODES:
        run(*layout.ctr(node), "images", "import", str(archive))
    archive.unlink()


def _shared_files() -> list[tuple[tarfile.TarInfo, bytes]]:
    """What a container needs beside /usr, which is the machine's own."""
    folders = ("usr", "etc", "opt", "opt/e2e", "opt/e2e/bin", "proc", "sys", "dev", "root")
    entries = [_folder(name, 0o755) for name in folders]
    entries.append(_folder("tmp", 0o1777))
    for name in ("bin", "sbin", "lib", "lib64"):
        link = tarfile.TarInfo(name)
        link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
        entries.append((link, b""))
    entries += [
        _file("etc/passwd", PASSWD.encode()),
        _file("etc/group", GROUP.encode()),
        _file("etc/nsswitch.conf", b"hosts: files dns\n"),
        _file("opt/e2e/bin/nslookup", NSLOOKUP.encode(), 0o755),
        _file("opt/e2e/bin/wandistill", WANDISTILL.encode(), 0o755),
    ]
    return entries


def _launch() -> dict:
    """How a container of the trainer starts, and the mark by which it gets the rest of its files."""
    inside = layout.CHECKOUT_INSIDE
    return {
        "Env": [
            f"PATH=/opt/e2e/bin:{inside}/.venv/bin:/usr/local/bin:/usr/bin:/bin",
            f"PYTHONPATH={inside}",
            "PYTHONDONTWRITEBYTECODE=1",
            f"{layout.SHARED_MARK}=1",
        ],
        "Entrypoint": ["wandistill", "launch"],
        "User": USER,
        "WorkingDir": "/tmp",
    }


def _folder(name: str, mode: int) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    return entry, b""


def _file(name: str, content: bytes, mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    return entry, content


def _write(path: Path, name: str, entries: list[tuple[tarfile.TarInfo, bytes]], config: dict) -> Path:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        for entry, content in entries:
            archive.addfile(entry, io.BytesIO(content))
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    image = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as archive:
        for file, content in (
            ("config.json", json.dumps(image).encode()),
            ("layer.tar", layer.getvalue()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry, data = _file(file, content)
            archive.addfile(entry, io.BytesIO(data))
    return path
