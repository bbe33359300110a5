"""`make bench-metrics` in part: what telling metrics costs a run, as a ratio in one run with and without.

One process trains the embedded teacher's student in blocks of whole steps, of a second or so: in every other block its
steps are told and a snapshot is written each second. Whole blocks are compared, since a snapshot falls into one step of
many, which a median of steps would leave out. Blocks that follow each other make a pair, whose order changes from pair
to pair, so that a drift of the machine cancels; many short pairs cancel more of it than a few long ones.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.bench_run import TOTAL_STEPS, bench_run

if TYPE_CHECKING:
    from wandistill.train.loop import Loop
    from wandistill.train.rank_snapshot import RankReporter

PAIRS, BLOCK_SECONDS = 100, 1.0
FASTER = 10
MOST = 0.01
# What others may take of the cores: beside more of it one per cent cannot be seen.
_IDLE = 0.1


class Block(NamedTuple):
    """What a block of steps took; seconds a step."""

    steps: int
    wall: float
    processor: float  # of all threads


class Switch:
    """Whether the reporter is told of steps and writes snapshots; while it is off its thread wakes for nothing."""

    on = False


class Ratio(NamedTuple):
    """How much more the told blocks of all pairs take."""

    median: float
    error: float  # standard error of the median

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Ratio:
        """Of told and silent figures, of blocks that tell `FASTER` times as often as a run."""
        low, middle, high = statistics.quantiles((told / silent - 1 for told, silent in pairs), n=4)
        # Of a normal distribution the quartiles are 1.349 deviations apart, and a median's error is 1.253 of a mean's.
        return cls(middle / FASTER, 1.253 * (high - low) / 1.349 / math.sqrt(len(pairs)) / FASTER)


def main() -> None:
    """Prints both ratios; ends with an error if that of the wall clock is surely over 1 %, on a machine that is idle
    otherwise."""
    busy, own, began = busy_seconds(), time.process_time(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure(Path(folder))
    elapsed = time.monotonic() - began
    others = (busy_seconds() - busy - (time.process_time() - own)) / elapsed / (os.cpu_count() or 1)
    wall = Ratio.of([(told.wall, silent.wall) for told, silent in pairs])
    processor = Ratio.of([(told.processor, silent.processor) for told, silent in pairs])
    for name, ratio in (("wall clock", wall), ("processor time", processor)):
        print(
            f"a run that tells its metrics takes {ratio.median:+.2%} of {name}, give or take {ratio.error:.2%} (of "
            f"{len(pairs)} pairs of blocks of {BLOCK_SECONDS:g} s that tell {FASTER} times as often: the median by "
            f"{FASTER}, and its standard error)"
        )
    print(f"other processes took {others:.0%} of the cores meanwhile")
    if others > _IDLE:
        print(f"that is more than {_IDLE:.0%}, so the wall clock's is no measure, and is not checked")
    elif wall.median - 2 * wall.error > MOST:
        sys.exit(f"telling metrics takes more than {MOST:.0%} of a run")


def busy_seconds() -> float:
    """Processor seconds of all processes of the machine so far, and what a hypervisor took of it."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(
        int, Path("/proc/stat").read_text().split(maxsplit=11)[1:11]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def measure(folder: Path) -> list[tuple[Block, Block]]:
    """Blocks with and without metrics, in pairs."""
    from wandistill.teacher.base import Expert
    from wandistill.train import rank_memory
    from wandistill.train.distributed import World
    from wandistill.train.rank_snapshot import INTERVAL, RankReporter

    class Switched(RankReporter):
        def _write(self) -> None:
            if Switch.on:
                super()._write()

    def on_step(step: int, figures: dict[str, float], expert: Expert) -> None:
        if Switch.on:
            for _ in range(FASTER):
                reporter.add_step(step, figures, expert)

    setup, _, _, loop = bench_run(str(folder), on_step)
    told = folder / "told"
    told.mkdir()
    rank_memory._PSS_LEAST_SECONDS /= FASTER
    rank_memory._PSS_SHARE *= FASTER
    world = World(0, 1, 0, 1, setup.world.device)
    reporter: RankReporter = Switched(world, told, interval=INTERVAL / FASTER)
    reporter.begin_steps(0, TOTAL_STEPS, TOTAL_STEPS)
    with reporter, reporter.during("train"):
        step = _block(loop, 0).steps
        pairs = []
        for number in range(PAIRS):
            found = {}
            for Switch.on in (True, False) if number % 2 else (False, True):
                found[Switch.on] = _block(loop, step)
                step += found[Switch.on].steps
            pairs.append((found[True], found[False]))
        Switch.on = False
    assert (told / "rank-0.json").exists()
    print(f"steps of {statistics.median(silent.wall for _, silent in pairs) * 1e3:.0f} ms")
    return pairs


def _block(loop: Loop, first: int) -> Block:
    began, used, steps = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < BLOCK_SECONDS:
        loop.take(first + steps)
        steps += 1
    return Block(steps, (time.perf_counter() - began) / steps, (time.process_time() - used) / steps)


if __name__ == "__main__":
    main()
