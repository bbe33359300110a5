"""Host memory while 8-bit weights are loaded and compared with bfloat16, beside the planner's figures.

Run as a program it does that once and prints by how many bytes it grew: in a process of its own, since what malloc
kept of other tests would be taken again.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine_setup import asks, place, setting, write_random

from wandistill.catalog import model_from_folder
from wandistill.config import from_mapping
from wandistill.models.wan import open_teacher
from wandistill.planner.from_config import request_of_config
from wandistill.planner.placements import Placement
from wandistill.planner.plan import evaluate
from wandistill.planner.quantization import BATCHES
from wandistill.planner.request import Machines
from wandistill.planner.student_memory import student_memory
from wandistill.student_config import student_spec
from wandistill.teacher import DTYPES, record_reader
from wandistill.teacher.base import Request
from wandistill.teacher.quantize import quantization_error
from wandistill.teacher.resident import cpu_computes
from wandistill.train.memory import host_memory
from wandistill.units import GIB, MIB

TESTS = Path(__file__).resolve().parents[1]
# What is freed goes back at once.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
# What torch's first operations of a kind take, and float32 copies of the pieces that are quantized.
ELSEWHERE = 48 * MIB


@contextmanager
def growth() -> Iterator[list[int]]:
    """The most bytes by which this process grew in the body: the one element, once it has ended."""
    before, grown, done = host_memory().total, [0], threading.Event()

    def look() -> None:
        while not done.wait(0.002):
            grown[0] = max(grown[0], host_memory().total - before)

    thread = threading.Thread(target=look)
    thread.start()
    yield grown
    done.set()
    thread.join()


def planned(teacher: Path, placement: str, dtype: str) -> int:
    """Bytes that the planner gives the comparison, the process itself not counted."""
    config = from_mapping({"teacher_dtype": dtype, "student_config": "half", "resolution": "16x16", "batch_size": 2})
    # Prompts of as many tokens as those that are asked with.
    model = dataclasses.replace(model_from_folder(teacher), token_length=5)
    half_cores = cpu_computes(torch.bfloat16)
    machines = Machines(None, 1, 1, host_memory=64 * GIB, cores=2, half_cores=half_cores)
    request = request_of_config(config, model, student_spec("half", model.architecture), machines)
    row = evaluate(request, student_memory(request), Placement(placement))
    assert row.node is not None
    return sum(term.size for term in row.node.host.phases["quantization"] if term.name != "processes")


# Blocks of 17 and 76 MB in bfloat16.
@pytest.mark.parametrize(
    ("heads", "ffn", "placement", "dtype", "threads"),
    [(12, 6144, "stream", "int8", 4), (12, 6144, "gpu", "int8", 1), (6, 2560, "cpu", "float8", 4)],
)
def test_loading_and_comparing_take_what_the_planner_says(
    heads: int, ffn: int, placement: str, dtype: str, threads: int, tiny_wan: Callable[[str], Path], tmp_path: Path
) -> None:
    teacher = Path(shutil.copytree(tiny_wan("t2v-1.3b"), tmp_path / "teacher"))
    sizes = {"num_attention_heads": heads, "ffn_dim": ffn, "num_layers": 4, "attention_head_dim": 128}
    write_random(teacher, dtype=torch.bfloat16, **sizes)
    command = [sys.executable, __file__, str(teacher), placement, dtype, str(threads)]
    env = {**os.environ, **MALLOC, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    grown = int(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()[-1])
    expected = planned(teacher, placement, dtype)
    assert abs(expected - grown) <= max(0.05 * grown, ELSEWHERE), (expected, grown)


def main(teacher: str, placement: str, dtype: str, threads: str) -> None:
    """Loads a teacher in `dtype` at `placement` with so many threads, compares it, and prints the growth in bytes."""
    record_reader._THREADS = int(threads)
    folder, output = open_teacher(teacher), Path(teacher)
    requests = [Request(*vars(ask).values()) for ask in asks(folder, [folder.experts[0]] * BATCHES)]
    with growth() as grown:
        ours = place(placement, setting(folder, output, DTYPES[dtype]))
        reference = place("disk", setting(folder, output, torch.bfloat16))
        quantization_error(ours, reference, requests)
        reference.close()
        ours.close()
    print(grown[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
