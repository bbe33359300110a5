"""A teacher whose blocks are compiled: the same answers at every placement, from one graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_setup import ENGINE, answers, asks, place, same, setting
from torch._dynamo.utils import counters

from wandistill.models.wan import open_teacher
from wandistill.teacher import compiled


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures graphs as for any backend; compiling them on a CPU would take a C++ compiler."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_blocks_slots_and_experts_share_one_graph_for_each_shape(
    tiny_wan: Callable[[str], Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = open_teacher(str(tiny_wan("t2v-a14b")))
    of = setting(folder, tmp_path, dtype, teacher_compile=True)
    plain = setting(folder, tmp_path, dtype)
    for graphs, batch in enumerate((2, 3, 2), 1):
        requests = asks(folder, batch=batch, features=(1,))
        eager = place("gpu", plain)
        expected = answers(eager, requests)
        eager.close()
        for name in ("gpu", *ENGINE):
            teacher = place(name, of)
            assert same(answers(teacher, requests), expected), name
            teacher.close()
        assert counters["stats"]["unique_graphs"] == min(graphs, 2)


def test_more_shapes_than_dynamo_takes_by_itself_are_compiled(tiny_wan: Callable[[str], Path], tmp_path: Path) -> None:
    folder = open_teacher(str(tiny_wan("t2v-1.3b")))
    teacher = place("stream", setting(folder, tmp_path, teacher_compile=True))
    for batch in range(1, 10):
        answers(teacher, asks(folder, batch=batch))
    assert counters["stats"]["unique_graphs"] == 9
