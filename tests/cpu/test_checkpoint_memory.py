"""A checkpoint is written with a small part of it in host memory."""

from __future__ import annotations

import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint.filesystem as filesystem

from wandistill.train import checkpoint
from wandistill.train.distributed import World

COUNT, SIZE = 16, 25_000


def state(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"student": {str(index): torch.full((SIZE,), float(value + index)) for index in range(COUNT)}}


def test_no_more_tensors_than_those_of_a_file_are_in_memory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint, "CHECKPOINT_FILE", 4 * 4 * SIZE)
    copies: list[weakref.ref[torch.Tensor]] = []
    most = 0
    load = filesystem._SerialCpuLoader.values

    def watched(loader):
        nonlocal most
        for tensor, item in load(loader):
            copy = tensor.clone()
            copies.append(weakref.ref(copy))
            most = max(most, sum(ref() is not None for ref in copies))
            yield copy, item
            del copy

    world = World(0, 1, 0, 1, torch.device("cpu"))
    # On a machine with a GPU too: its loader copies ahead, which is switched off.
    with (
        patch.object(filesystem._SerialCpuLoader, "values", watched),
        patch.object(torch.cuda, "is_available", lambda: True),
    ):
        path = checkpoint.save(tmp_path, 1, state(0), {}, world, keep=1)
    assert len(copies) == COUNT
    assert most <= 4 + 1, "one file's tensors, and the one that is being read"
    files = list((path / "state").glob("*.distcp"))
    assert len(files) == 4 and all(file.stat().st_size < 6 * 4 * SIZE for file in files)

    found = state(-1)
    checkpoint.load(path, found, world)
    assert all(torch.equal(found["student"][name], tensor) for name, tensor in state(0)["student"].items())
