"""Keeps what the ranks of a run on a real GPU told, for the panels of GPUs.

`python -m tests.metrics.record -- COMMAND`, where COMMAND is a `wandistill train`, alone or under torchrun, that takes
long enough for a checkpoint. Of each rank the last snapshot of its training is kept in tests/metrics/recorded, named by
its GPU; tests/metrics/replay.py plays them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from wandistill.metrics.snapshot import Snapshot, read_all

RECORDED = Path(__file__).with_name("recorded")


def main() -> int:
    if sys.argv[1:2] != ["--"] or not sys.argv[2:]:
        print("usage: python -m tests.metrics.record -- COMMAND", file=sys.stderr)
        return 2
    kept: dict[int, Snapshot] = {}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(sys.argv[2:], env={**os.environ, "WANDISTILL_METRICS_DIR": folder})
        while process.poll() is None:
            kept |= {told.rank: told for told in read_all(Path(folder)) if _trains(told)}
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
    for told in kept.values():
        ((labels, _),) = told.samples["wandistill_rank_gpu_info"]
        name = labels["gpu_name"].lower().replace(" ", "-")
        (RECORDED / f"{name}-rank-{told.rank}.json").write_text(json.dumps(asdict(told), indent=1) + "\n")
    print(f"{len(kept)} ranks are recorded in {RECORDED}", file=sys.stderr)
    return process.returncode or int(not kept)


def _trains(told: Snapshot) -> bool:
    """Whether the rank takes steps on a GPU; the first rank has told of a checkpoint too."""
    phases = told.samples.get("wandistill_rank_phase", ())
    return (
        ({"phase": "train"}, 1) in [(own, value) for own, value in phases]
        and "wandistill_rank_gpu_info" in told.samples
        and (told.rank != 0 or "wandistill_checkpoint_bytes" in told.samples)
    )


if __name__ == "__main__":
    sys.exit(main())
