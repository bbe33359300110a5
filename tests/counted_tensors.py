"""Stands for a rank's GPU on a CPU: what torch would have allocated is counted from the tensors that are alive.

Tensors that C++ alone holds, as autograd and DDP do, are not seen; gradients, moments and all that Python has are. It
looks as each step begins and before the optimizer's part of it, in the thread that trains: Python's list of all objects
has half-made ones of other threads.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch

from wandistill.models.held import block_bytes, plain_tensors
from wandistill.train import rank_snapshot
from wandistill.train.measured_terms import MeasuredTerms
from wandistill.train.student import TrainedStudent

CPU = torch.device("cpu")


class CountedTensors:
    """Takes the place of `wandistill.train.rank_memory.GpuMemory`; what it sees goes into `file`, a line a look."""

    def __init__(self, file: Path) -> None:
        self.terms = MeasuredTerms(CPU, live_bytes)
        self._file = file

    def samples(self) -> dict[str, list[Any]]:
        """Nothing: this is asked from another thread."""
        return {}

    def look(self, where: str) -> None:
        """Notes allocated bytes and their terms."""
        counted = self.terms.counted()
        allocated = live_bytes()
        samples = self.terms.samples(allocated, counted)
        with self._file.open("a") as file:
            file.write(json.dumps({"where": where, "allocated": allocated, "samples": samples}) + "\n")


def live_bytes() -> int:
    """Bytes of all storages that torch allocated and a tensor or a gradient in Python has."""
    found: dict[int, int] = {}
    mapped = _mapped()
    for thing in gc.get_objects():
        if not isinstance(thing, torch.Tensor):
            continue
        for tensor in (thing, thing.grad) if isinstance(thing, torch.nn.Parameter) else (thing,):
            for plain in plain_tensors(tensor) if tensor is not None else ():
                address = plain.untyped_storage().data_ptr() if plain.device == CPU else 0
                if not any(address in places for places in mapped):
                    found[address] = block_bytes(plain)
    return sum(size for address, size in found.items() if address)


def _mapped() -> list[range]:
    """Addresses of files and shared memory, where the host copy of a teacher is."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = [line[0].split("-") for line in lines if "s" in line[1] or line[-1].startswith("/")]
    return [range(int(begin, 16), int(end, 16)) for begin, end in ends]


def instead_of_a_gpu(folder: str, rank: int) -> None:
    """Lets the run of this process, a rank, tell `CountedTensors` in `folder`/seen-RANK.jsonl."""
    os.environ["WANDISTILL_METRICS_DIR"] = folder
    counted = CountedTensors(Path(folder) / f"seen-{rank}.jsonl")
    rank_snapshot.gpu_memory = lambda device: counted  # type: ignore[assignment, return-value]
    begin, step = rank_snapshot.RankReporter.begin_step, TrainedStudent.step

    def begin_and_look(self: rank_snapshot.RankReporter, left: object) -> None:
        self._next_look = 0.0
        begin(self, left)
        counted.look("begin")

    def look_and_step(self: TrainedStudent, *arguments: Any) -> torch.Tensor:
        counted.look("step")
        return step(self, *arguments)

    rank_snapshot.RankReporter.begin_step = begin_and_look  # type: ignore[method-assign]
    TrainedStudent.step = look_and_step  # type: ignore[method-assign]
