"""The CPU benchmark of the engine, with small teachers."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.cpu.bench_engine import SIZES, WAYS, measure, memory_rate, random_teacher
from wandistill.device_map import unit_bytes
from wandistill.models.wan import open_teacher
from wandistill.train.distributed import World


def test_slots_copy_every_block_once_however_many_prompts_wait(tmp_path: Path) -> None:
    folder = random_teacher(tmp_path / "teacher", SIZES["tiny"], blocks=3)
    world = World(0, 1, 0, 1, torch.device("cpu"))
    block = unit_bytes(open_teacher(str(folder)).architecture, "float32", 1)[1]
    for prompts in (1, 4):
        rows = {row.way: row for row in measure(folder, world, prompts, rounds=1)}
        assert tuple(rows) == WAYS and rows["gpu"].ratio == 1
        # A record's tensors are aligned, which makes it a little larger than they are.
        for way in ("offload", "stream"):
            assert 3 * block <= rows[way].copied < 3 * block * 1.01
        assert rows["gpu"].copied == rows["cpu"].copied == rows["disk"].copied == 0
        assert all(row.seconds > 0 and row.ratio > 0 for row in rows.values())
    assert memory_rate(world, block) > 0
