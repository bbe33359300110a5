"""A registry on this machine for a while, which the nodes of the local cluster pull from."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.kubectl import wait_until
from tests.cluster.local import layout
from tests.tools.build import tool


@contextmanager
def registry(folder: Path) -> Iterator[None]:
    """It answers within the body.

    Args:
        folder: where its settings, images and log are.
    """
    settings = folder / "settings.yaml"
    storage = {"filesystem": {"rootdirectory": str(folder / "images")}}
    settings.write_text(json.dumps({"version": 0.1, "storage": storage, "http": {"addr": layout.REGISTRY}}))
    command = [str(tool("registry")), "serve", str(settings)]
    environment = {**os.environ, "OTEL_TRACES_EXPORTER": "none"}  # else it looks for a collector on this machine
    with (
        open(folder / "registry.log", "wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process,
    ):
        try:
            wait_until(answers, 30, f"the registry at {layout.REGISTRY} to answer, see {log.name}", every=0.1)
            yield
        finally:
            process.terminate()


def answers() -> bool:
    # Whatever proxy the environment names is not for an address of this machine.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://{layout.REGISTRY}/v2/", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
