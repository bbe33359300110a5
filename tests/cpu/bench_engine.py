"""`make bench`: what the block engine costs beside the resident teacher, on the CPU.

The teacher is bound by memory: four tokens a forward, so that a block's weights are read once for little arithmetic,
and every byte that a placement copies is seen. All ways to keep it are placed in one process and take turns on the
same tensors, so that a drift of the machine hits all of them. Copies should cost what this machine's memory takes for
them, so a row shows, beside its ratio to the resident teacher, that to the resident teacher plus its bytes at the
measured rate. Then the same for more blocks and for more prompts that wait together, on one rank and on two.

    --sizes tiny     proves the program itself in seconds
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Its helpers are in tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engine_setup import place, write_random
from tests.gpu.bench_measure import Shape, ask_of
from tests.tiny_wan import LAYOUTS, build_tiny_wan
from tests.worlds import run_world
from wandistill.config import from_mapping
from wandistill.device_map import unit_bytes
from wandistill.launch import records
from wandistill.models.wan import open_teacher
from wandistill.teacher import Setting
from wandistill.teacher.base import Expert, Teacher
from wandistill.teacher.copy_stream import Copied
from wandistill.train import distributed
from wandistill.train.distributed import World

WAYS = ("gpu", "cpu", "offload", "stream", "disk")  # gpu on a CPU is the resident teacher
SHAPE = Shape("32x32", 1, 8)
WARM_UP = 1


class Sizes(NamedTuple):
    """How large the teachers are."""

    heads: int
    ffn: int
    blocks: Sequence[int]
    prompts: Sequence[int]  # that wait together, of the teacher with the most blocks
    rounds: int


# A block of 64 MiB is beyond a core's caches; 24 of them are 1.6 GB.
SIZES = {"full": Sizes(8, 4096, (6, 12, 24), (1, 2, 4, 8), 7), "tiny": Sizes(1, 128, (1, 2), (1, 2), 2)}


class Row(NamedTuple):
    """One way to keep one teacher."""

    way: str
    seconds: float  # of a step
    ratio: float  # to the resident teacher, the median over rounds
    copied: int  # bytes a step


def random_teacher(folder: Path, sizes: Sizes, blocks: int) -> Path:
    """Writes a teacher of one expert with random float32 weights."""
    build_tiny_wan(LAYOUTS["t2v-1.3b"], folder)
    shape = {"num_attention_heads": sizes.heads, "attention_head_dim": 128, "ffn_dim": sizes.ffn}
    return write_random(folder, num_layers=blocks, **shape)


def measure(folder: Path, world: World, prompts: int, rounds: int) -> list[Row]:
    """A row for each way; all ranks call this together, and get the slowest rank's figures."""
    config = {"teacher_path": str(folder), "output_dir": str(folder / "run"), "device": "cpu"}
    setting = Setting(from_mapping(config), open_teacher(str(folder)), torch.float32, world)
    ask = ask_of(setting, SHAPE)

    def step(teacher: Teacher) -> torch.Tensor:
        tickets = [teacher.request(*ask, Expert.HIGH, 1.0) for _ in range(prompts)]
        return torch.cat([teacher.result(ticket).velocity for ticket in tickets])

    teachers = {way: place(way, setting) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    copied: dict[str, int] = {}
    expected = step(teachers["gpu"])
    for number in range(WARM_UP + rounds):
        for way, teacher in teachers.items():
            world.barrier()
            before, began = Copied.size, time.perf_counter()
            answer = step(teacher)
            took = time.perf_counter() - began
            copied[way] = Copied.size - before
            assert torch.equal(answer, expected), f"{way} answers otherwise than the resident teacher"
            if number >= WARM_UP:
                seconds[way].append(max(world.gather(took)))
    for teacher in teachers.values():
        teacher.close()
    return [
        Row(
            way,
            statistics.median(seconds[way]),
            statistics.median(own / base for own, base in zip(seconds[way], seconds["gpu"], strict=True)),
            copied[way],
        )
        for way in WAYS
    ]


def memory_rate(world: World, size: int) -> float:
    """Bytes a second of copies between buffers of `size` bytes that no cache holds, all ranks at once."""
    source = torch.ones(size * 8, dtype=torch.uint8).split(size)
    targets = [torch.empty_like(source[0]) for _ in range(2)]
    for target in targets:
        target.copy_(source[0])
    rates = []
    for _ in range(5):
        world.barrier()
        began = time.perf_counter()
        for number, part in enumerate(source):
            targets[number % 2].copy_(part)
        rates.append(sum(part.nbytes for part in source) / (time.perf_counter() - began))
    return min(world.gather(statistics.median(rates)))


def run(folder: Path, world: World, sizes: Sizes) -> None:
    """All tables of this world."""

    def say(*cells: Any) -> None:
        if world.is_main:
            print("".join(f"{cell:>12}" for cell in cells), flush=True)

    largest = folder / str(sizes.blocks[-1])
    block = unit_bytes(open_teacher(str(largest)).architecture, "float32", 1)[1]
    rate = memory_rate(world, block)
    say(
        f"{world.size} rank(s) of {torch.get_num_threads()} thread(s), blocks of {block / 1e6:.1f} MB, "
        f"copies of {rate / 1e9:.1f} GB/s on every rank at once"
    )
    cases = [(folder / str(blocks), blocks, 1) for blocks in sizes.blocks]
    cases += [(largest, sizes.blocks[-1], prompts) for prompts in sizes.prompts if prompts > 1]
    say("blocks", "prompts", "way", "ms", "ms a pass", "to resident", "to floor")
    for teacher, blocks, prompts in cases:
        rows = measure(teacher, world, prompts, sizes.rounds)
        base = rows[0].seconds
        for row in rows:
            each = row.seconds / blocks / prompts
            floor = row.seconds / (base + row.copied / rate)
            ratio = f"{row.ratio:.3f}"
            say(blocks, prompts, row.way, f"{row.seconds * 1e3:.1f}", f"{each * 1e3:.2f}", ratio, f"{floor:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=SIZES, default="full")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--as_rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = SIZES[args.sizes]
    if args.as_rank:
        run(args.as_rank, distributed.start(from_mapping({"device": "cpu"})), sizes)
        distributed.stop()
        records.end_process(0)
    with tempfile.TemporaryDirectory(prefix="wandistill-bench-") as folder:
        for blocks in sizes.blocks:
            random_teacher(Path(folder) / str(blocks), sizes, blocks)
        for ranks in args.ranks:
            if code := run_world("tests.cpu.bench_engine", ranks, ["--as_rank", folder, *sys.argv[1:]]):
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
