"""Serves snapshots that ranks wrote on a real GPU run as if they were told now; standard library and wandistill only.

`python replay.py RECORDED FOLDER RUN POOL PORT` runs until it is ended. The cluster tests run it in a pod.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from wandistill.metrics import snapshot
from wandistill.metrics.pod import PodState, serve


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The snapshots in the folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def told(record: dict[str, Any]) -> snapshot.Snapshot:
    """A recorded snapshot as one of this process and of now: its times are moved, all else is left as it was."""
    now = snapshot.mine(record["rank"], record["local_rank"], record["node_rank"])
    since = time.time() - record["wall"]
    now.samples = {
        name: [(own, value + since) for own, value in samples] if name.endswith("timestamp_seconds") else samples
        for name, samples in record["samples"].items()
    }
    return now


def replay(source: Path, folder: Path, stop: threading.Event) -> None:
    """Writes the recorded snapshots every second until `stop`."""
    records = recorded(source)
    while True:
        for record in records:
            snapshot.write(folder, told(record))
        if stop.wait(1):
            return


def main() -> None:
    source, folder, run, pool, port = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    serve(PodState(run, pool, 0), Path(folder), int(port))
    replay(Path(source), Path(folder), threading.Event())


if __name__ == "__main__":
    main()
