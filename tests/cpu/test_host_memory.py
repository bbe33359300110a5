"""A host copy of the teacher is in memory once, however many ranks there are, while a run loads it too."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from engine_setup import write_random
from process_memory import occupied_bytes
from runs import ENVIRONMENT, flags, torchrun

from wandistill.models.wan import open_teacher

# Blocks of 37.7 MB in float32; of both teachers alike, since a streamed teacher's slots are in a CPU run's memory too.
BLOCK = {"num_attention_heads": 12, "attention_head_dim": 64, "ffn_dim": 3072}
LARGE, SMALL = 29, 1  # blocks: 1.02 GiB, and as good as nothing
STUDENT = {"num_layers": 1, "num_attention_heads": 2, "ffn_dim": 256}
# One prompt a rank, one at a time, and no guidance: a rank's own batches come and go, the more of them the more blocks
# there are, and are no part of what is measured.
RUN = {
    "device": "cpu",
    "teacher_dtype": "float32",
    "init": "random",
    "resolution": "32x32",
    "batch_size": 1,
    "guidance_scale": 1,
    "rollout_steps": 1,
    "max_steps": 10_000,
    "checkpoint_interval": 10_000,
}
# What is freed goes back at once: what malloc would keep of it differs from run to run, by 30 MB a rank.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
STEPS = 3
BETWEEN_LOOKS = 0.05
LIMIT = 1.05


@pytest.fixture(scope="module")
def teachers(tiny_wan: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of the large and the small teacher, which differ in their number of blocks alone."""
    root = tmp_path_factory.mktemp("teachers")
    folders = [Path(shutil.copytree(tiny_wan("t2v-1.3b"), root / name)) for name in ("large", "small")]
    for folder, blocks in zip(folders, (LARGE, SMALL), strict=True):
        write_random(folder, num_layers=blocks, **BLOCK)
    return folders


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("placement", ["cpu", "stream"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_holds_its_teacher_once_from_its_start_and_leaves_nothing_when_killed(
    placement: str, ranks: int, teachers: Sequence[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in MALLOC.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    shared_before = sorted(path.name for path in Path("/dev/shm").iterdir())
    sizes = [4 * open_teacher(str(folder)).architecture.parameters for folder in teachers]
    peaks = [peak_of_a_run(ranks, placement, folder, tmp_path / folder.name) for folder in teachers]
    assert sorted(path.name for path in Path("/dev/shm").iterdir()) == shared_before
    ratio = (peaks[0] - peaks[1]) / (sizes[0] - sizes[1])
    print(json.dumps({"placement": placement, "ranks": ranks, "sizes": sizes, "peaks": peaks, "ratio": ratio}))
    assert 0.98 <= ratio <= LIMIT


def peak_of_a_run(ranks: int, placement: str, teacher: Path, folder: Path) -> int:
    """Most bytes that all processes of a run occupied together, from its start until it was killed in mid-run."""
    folder.mkdir()
    (folder / "prompts.txt").write_text("\n".join(f"a red circle left of {n} blue squares" for n in range(ranks)))
    (folder / "student.json").write_text(json.dumps(STUDENT))
    given = {
        "teacher_path": teacher,
        "teacher_device_strategy": placement,
        "data_path": folder / "prompts.txt",
        "student_config": folder / "student.json",
        "output_dir": folder / "run",
    }
    run = torchrun(ranks, flags({**RUN, **given}))
    log, peak = folder / "run" / "metrics.jsonl", 0
    try:
        while steps_of(log) < STEPS and run.poll() is None:
            peak = max(peak, occupied_bytes(family(run.pid), teacher))
            time.sleep(BETWEEN_LOOKS)
    finally:
        for process in family(run.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        said, _ = run.communicate()
    assert steps_of(log) >= STEPS, said[-6000:]
    return peak


def steps_of(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def family(first: int) -> list[int]:
    """`first`, and all that it and they started. Not its session: torchrun gives each rank one of its own."""
    parents = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
    found = [first]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found
