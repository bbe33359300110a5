"""`make bench-metrics` in part: what telling metrics costs a run, as a ratio in one run with and without.

One process trains the embedded teacher's student in blocks of whole steps, of some seconds each: in every other block
its steps are told and a snapshot is written each second. Whole blocks are compared, since a snapshot falls into one
step of many, which a median of steps would leave out. Blocks that follow each other make a pair, whose order changes
from pair to pair, so that a drift of the machine cancels.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.bench_run import TOTAL_STEPS, bench_run

if TYPE_CHECKING:
    from wandistill.train.loop import Loop
    from wandistill.train.rank_snapshot import RankReporter

PAIRS, BLOCK_SECONDS = 16, 5.0
MOST = 0.01
# Load of other processes, as a share of the cores, beside which one per cent cannot be seen.
_IDLE = 0.25


class Block(NamedTuple):
    """What a block of steps took; seconds a step."""

    steps: int
    wall: float
    processor: float  # of all threads


class Switch:
    """Whether the reporter is told of steps and writes snapshots; while it is off its thread wakes for nothing."""

    on = False


def main() -> None:
    """Prints both ratios; ends with an error if the wall clock's is over 1 % on a machine that is idle otherwise."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure(Path(folder))
    ratios = {
        "wall clock": [told.wall / silent.wall - 1 for told, silent in pairs],
        "processor time": [told.processor / silent.processor - 1 for told, silent in pairs],
    }
    for name, values in ratios.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(
            f"a run that tells its metrics takes {middle:+.2%} of {name} (median of {len(values)} pairs of blocks of "
            f"{BLOCK_SECONDS:g} s; half of them between {low:+.2%} and {high:+.2%})"
        )
    if load > _IDLE * len(os.sched_getaffinity(0)):
        print(f"the load was {load:.1f} as this began, so the wall clock's is no measure, and is not checked")
    elif statistics.median(ratios["wall clock"]) > MOST:
        sys.exit(f"telling metrics takes more than {MOST:.0%} of a run")


def measure(folder: Path) -> list[tuple[Block, Block]]:
    """Blocks with and without metrics, in pairs."""
    from wandistill.teacher.base import Expert
    from wandistill.train.distributed import World
    from wandistill.train.rank_snapshot import RankReporter

    class Switched(RankReporter):
        def _write(self) -> None:
            if Switch.on:
                super()._write()

    def on_step(step: int, figures: dict[str, float], expert: Expert) -> None:
        if Switch.on:
            reporter.add_step(step, figures, expert)

    setup, _, _, loop = bench_run(str(folder), on_step)
    told = folder / "told"
    told.mkdir()
    reporter: RankReporter = Switched(World(0, 1, 0, 1, setup.world.device), told)
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
