"""Checkpoints: everything that a run needs to go on, written beside and renamed.

A checkpoint is a folder `step-N`: `state/` (torch.distributed.checkpoint: student, optimizer and average, readable by
any number of ranks), `trainer.json` (step, samples seen, loss scale) and `manifest.json` (every file with its size),
which is written last. A folder without a manifest, or with a file of another size, is not a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from wandistill.errors import ConfigError, TrainingFailed
from wandistill.launch.causes import cause_of
from wandistill.planner.memory import CHECKPOINT_FILE
from wandistill.train.distributed import World

# One process saves and loads alone on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_NAME = re.compile(r"^step-(\d+)$")


def save(root: Path, step: int, state: dict[str, Any], trainer: dict[str, Any], world: World, keep: int) -> Path:
    """Writes checkpoint `step-N` below `root` and removes all but the newest `keep`.

    Raises:
        TrainingFailed: the disk is full or not writable; the former checkpoints stay as they were.
    """
    final, partial = root / f"step-{step}", root / f".step-{step}.partial"
    failure = ""
    try:
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        world.barrier()
        writer = _Writer(partial / "state")
        dcp.save(state, storage_writer=writer, process_group=world.group, no_dist=world.size == 1)
        if world.is_main:
            (partial / "trainer.json").write_text(json.dumps({"schema": 1, "step": step, **trainer}))
            _write_manifest(partial)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(partial, final)
    except (OSError, dcp.api.CheckpointException, RuntimeError) as error:
        if cause_of(error) is not None:
            raise
        # torch reports a full disk as a RuntimeError of its writer, as well as an OSError.
        failure = str(error).strip().splitlines()[-1][:300] if str(error).strip() else type(error).__name__
    failures = [text for text in world.gather(failure) if text]
    if failures:
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(root).free
        raise TrainingFailed(
            f"checkpoint {final} could not be written ({failures[0]}; {free:,} bytes free there). Make room and start "
            "the same command again: it goes on from the checkpoint before, which is untouched."
        )
    if world.is_main:
        for old in checkpoints(root)[keep:]:
            shutil.rmtree(old, ignore_errors=True)
    return final


class _Writer(dcp.FileSystemWriter):
    """Writes a rank's tensors in as many files of like size as keep each near `CHECKPOINT_FILE`, one after the other.

    torch's writer holds all tensors of a file in host memory until the file is whole (it does so for safetensors, and
    in every format), and with copies ahead in page-locked memory that it never gives back: a checkpoint of 12 GB took
    13.5 GB of a node until the run's end.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        sizes = [
            math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            for item in plan.items
            if item.tensor_data is not None
        ]
        # The base class makes a file for each thread.
        self.thread_count = max(1, math.ceil(sum(sizes) / CHECKPOINT_FILE))
        return super().write_data(plan, planner)

    def _write_data(self, planner: SavePlanner, file_queue: Any) -> Future[list[WriteResult]]:
        self.thread_count = 1
        return super()._write_data(planner, file_queue)


def checkpoints(root: Path) -> list[Path]:
    """The checkpoints below `root`, newest first."""
    if not root.is_dir():
        return []
    found = [(int(match.group(1)), path) for path in root.iterdir() if (match := _NAME.match(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def step_of(path: Path) -> int:
    """The step that the checkpoint at `path` was written after."""
    return int(json.loads((path / "trainer.json").read_text())["step"])


def damage(path: Path) -> str:
    """What is wrong with the checkpoint at `path`; empty if nothing is."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError):
        return "it has no readable manifest.json"
    for name, size in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes instead of {size:,}"
    return ""


def choose(root: Path, resume: str) -> tuple[Path | None, list[str]]:
    """The checkpoint that `resume` asks for (None: start anew), and what to tell about damaged ones passed over.

    Raises:
        ConfigError: `latest` without a checkpoint, a path that is none, or only damaged ones.
    """
    if resume not in ("auto", "latest", "never"):
        path = Path(resume)
        problem = damage(path)
        if problem:
            raise ConfigError(
                f"--resume {resume}: is not a whole checkpoint ({problem}); give a folder checkpoints/step-N, or "
                "--resume latest for the newest whole one."
            )
        return path, []
    notes: list[str] = []
    found = [] if resume == "never" else checkpoints(root)
    for path in found:
        problem = damage(path)
        if not problem:
            return path, notes
        notes.append(f"checkpoint {path} is damaged ({problem}); going back to the one before")
    if notes:
        raise ConfigError(
            f"every checkpoint in {root} is damaged: {'; '.join(notes)}. Remove that folder to start anew."
        )
    if resume == "latest":
        raise ConfigError(f"--resume latest: there is no checkpoint in {root}; use --resume auto to start anew.")
    return None, notes


def load(path: Path, state: dict[str, Any], world: World) -> dict[str, Any]:
    """Fills the tensors of `state` in place from the checkpoint, whatever number of ranks wrote it; returns what
    trainer.json holds."""
    reader = dcp.FileSystemReader(path / "state")
    dcp.load(state, storage_reader=reader, process_group=world.group, no_dist=world.size == 1)
    trainer = json.loads((path / "trainer.json").read_text())
    assert isinstance(trainer, dict)
    return trainer


def load_student_weights(path: Path, *, average: bool) -> dict[str, Tensor]:
    """The student's weights of a checkpoint by parameter name, float32 on the CPU; `average` takes the EMA's."""
    problem = damage(path)
    if problem:
        raise ConfigError(f"{path} is not a whole checkpoint: {problem}.")
    reader = dcp.FileSystemReader(path / "state")
    prefix = "average." if average else "student."
    wanted = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    if not wanted:
        raise ConfigError(f"{path} holds no {'average' if average else 'student'} weights.")
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    return {key.removeprefix(prefix): tensor.float() for key, tensor in wanted.items()}


def _write_manifest(folder: Path) -> None:
    files = {str(file.relative_to(folder)): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()}
    text = json.dumps({"schema": 1, "files": files}, indent=1)
    with open(folder / "manifest.json", "w") as manifest:
        manifest.write(text)
        manifest.flush()
        os.fsync(manifest.fileno())
