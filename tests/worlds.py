"""Worlds of ranks of one of the tests' own programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def run_world(module: str, ranks: int, arguments: Sequence[str]) -> int:
    """Runs `python -m module` on `ranks` ranks, which share the cores; returns torchrun's exit code.

    torchrun stops the other ranks of one that fails.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", module]
    env = {**os.environ, "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
    return subprocess.run([*command, *arguments], check=False, env=env).returncode
