"""The metrics endpoint of `wandistill launch`: it outlives the ranks, and counts what ended them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from wandistill.config import TrainConfig
from wandistill.errors import ExitCode
from wandistill.launch.ending import Ending
from wandistill.metrics.names import OOM_KINDS, PHASES
from wandistill.metrics.pod import PodState, serve

FOLDER = "WANDISTILL_METRICS_DIR"
# The port in a pod, where --metrics_port says nothing.
PORT = "WANDISTILL_METRICS_PORT"
# Bytes at the end of metrics.jsonl that hold its last line.
_TAIL = 4096
# The planner's phases by the table's names; the others are parts of a step.
_PHASES = {
    "caches": "prepare",
    "loading": "load",
    "quantization": "load",
    "building": "load",
    "samples": "sample",
}


class LauncherMetrics:
    """Serves this node's metrics if `--metrics_port` or the pod asks for it; else every call does nothing.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(self, config: TrainConfig, node_rank: int) -> None:
        run = os.environ.get("WANDISTILL_RUN") or Path(config.output_dir).resolve().name
        self._state = PodState(run, os.environ.get("WANDISTILL_POOL") or "local", node_rank)
        self._tries = 0
        port = config.metrics_port or int(os.environ.get(PORT, "0"))
        self._folder = Path(tempfile.mkdtemp(prefix="wandistill-metrics-")) if port else None
        self._endpoint = serve(self._state, self._folder, port) if self._folder else None

    def begin_try(self, replans: int) -> dict[str, str]:
        """A try begins, after `replans` changes of the placement; returns the variables that its ranks need."""
        self._tries += 1
        self._state.restarts, self._state.replans = self._tries - 1, replans
        return {FOLDER: str(self._folder)} if self._folder else {}

    def end_try(self, ending: Ending, kind: str = "", phase: str = "") -> None:
        """A try ended; `kind` and `phase` are those of an out-of-memory report."""
        self._state.exit_code = int(ending.code)
        if ending.code is ExitCode.OUT_OF_MEMORY:
            known = kind if kind in OOM_KINDS else "host"  # page-locked memory is the host's
            phase = _PHASES.get(phase, phase)
            self._state.count_oom(known, ending.rank or 0, phase if phase in PHASES else "train")

    def close(self) -> None:
        """Stops serving."""
        if self._endpoint is not None and self._folder is not None:
            self._endpoint.close()
            shutil.rmtree(self._folder, ignore_errors=True)


def last_figures(output_dir: Path) -> dict[str, Any]:
    """Step and loss of the last whole line of metrics.jsonl; empty where there is none."""
    try:
        with open(output_dir / "metrics.jsonl", "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL, 0))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = json.loads(line)
            return {"step": int(found["step"]), "loss": float(found["loss"])}
    return {}
