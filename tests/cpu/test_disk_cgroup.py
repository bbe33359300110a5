"""Placement `disk` in a real memory cgroup of a quarter of the teacher's size."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine_setup import write_random

from wandistill.models.wan import open_teacher

PROGRAM = Path(__file__).parents[1] / "disk_cgroup_run.py"
# Two experts of 32 blocks of 36 M parameters in bfloat16: 4.7 GB, of which a quarter holds Python and torch.
SIZES = {"num_layers": 32, "num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 5632}
DISK_BUFFER = "160MiB"  # two blocks
STEPS = 4


@dataclass(frozen=True)
class Cgroup:
    """A memory cgroup of this test, version 1 or 2."""

    folder: Path

    def limit(self, size: int) -> None:
        names = ("memory.max", "memory.swap.max") if self._second else ("memory.limit_in_bytes",)
        for name, value in zip(names, (size, 0), strict=False):
            (self.folder / name).write_text(str(value))

    @property
    def _second(self) -> bool:
        return (self.folder / "memory.max").exists()

    @property
    def peak(self) -> int:
        """Most bytes that were charged at once, page cache too."""
        name = "memory.peak" if self._second else "memory.max_usage_in_bytes"
        return int((self.folder / name).read_text())

    @property
    def killed(self) -> int:
        """Processes that the kernel killed for want of memory."""
        name = "memory.events" if self._second else "memory.oom_control"
        return int(dict(line.split() for line in (self.folder / name).read_text().splitlines())["oom_kill"])


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    first = Path("/sys/fs/cgroup/memory")
    folder = (first if first.is_dir() else first.parent) / f"wandistill-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this user may not make a memory cgroup: {error}")
    yield Cgroup(folder)
    folder.rmdir()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_teacher_on_disk_trains_in_a_quarter_of_its_size_and_reads_its_blocks_once_a_step(
    tiny_wan: Callable[[str], Path], tmp_path: Path, cgroup: Cgroup
) -> None:
    path = Path(shutil.copytree(tiny_wan("t2v-a14b"), tmp_path / "teacher"))
    folder = open_teacher(str(write_random(path, dtype=torch.bfloat16, **SIZES)))
    teacher = 2 * folder.architecture.parameters * len(folder.experts)
    blocks = 2 * folder.architecture.block_parameters * folder.architecture.num_layers
    cgroup.limit(teacher // 4)
    arguments = [path, tmp_path / "run", DISK_BUFFER, cgroup.folder / "cgroup.procs", STEPS]
    run = subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert cgroup.killed == 0 and run.returncode == 0, run.stderr[-3000:]
    steps = json.loads(run.stdout)
    print(json.dumps({"teacher": teacher, "limit": teacher // 4, "peak": cgroup.peak, "blocks": blocks, "read": steps}))
    assert len(steps) == STEPS
    assert steps == pytest.approx([blocks] * STEPS, rel=0.05)
    assert cgroup.peak <= teacher // 4
