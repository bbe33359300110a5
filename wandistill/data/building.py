"""How the ranks share the filling of a cache.

Every cache is built the same way: all ranks look what is missing, wait for each other, and take the missing items in
rounds of one batch a rank. Batches are cut from the list of missing items, not from a rank's part of it, and all have
the same size, so an item gets the same neighbours whatever the number of ranks, and after a kill between two batches.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from wandistill.data.shards import free_bytes
from wandistill.data.store import Store
from wandistill.errors import ConfigError, DoesNotFit, Interrupted
from wandistill.train.distributed import World
from wandistill.train.progress import Progress
from wandistill.units import format_bytes, format_seconds

_log = logging.getLogger(__name__)

# Below this nobody needs to know beforehand how long it takes.
_SHORT_SECONDS = 60.0

Compute = Callable[[list[str]], Sequence[Mapping[str, Tensor]]]


@dataclass(frozen=True)
class Work:
    """The filling of one store."""

    title: str  # what is built, for people
    store: Store
    keys: Sequence[str]  # all items that must be there in the end
    batch_size: int  # items computed at once; fewer only if there are fewer in all
    item_bytes: Callable[[list[str]], float]  # mean bytes on disk of the given items
    item_seconds: float | None = None  # predicted, of all ranks together


def check_disk(works: Sequence[Work], cache_dir: Path, world: World) -> None:
    """Says what each work will write and how long it takes, and refuses if the disk has no room for it.

    Raises:
        DoesNotFit: more bytes are needed than are free.
    """
    needed, lines = 0, []
    for work in works:
        missing, total = work.store.missing(work.keys)
        count = round(len(missing) * work.item_bytes(missing)) if missing else 0
        needed += count
        todo = f"{len(missing)} to build, {format_bytes(count)} to write" if missing else "complete"
        if missing and work.item_seconds is not None:
            seconds = len(missing) * work.item_seconds
            todo += f", about {seconds / 3600:.2g} hours ({format_seconds(seconds)}) as planned"
        lines.append(f"{work.title}: {total - len(missing)} of {total} in {work.store.folder}, {todo}")
    free = free_bytes(cache_dir)
    if world.is_main:
        for line in lines:
            _log.info(line)
        if needed:
            _log.info(
                f"disk of {cache_dir}: {format_bytes(needed)} to write, {format_bytes(free)} free. The time is "
                "measured, and told again, after the first batch of each."
            )
    if needed > free:
        raise DoesNotFit(
            f"--cache_dir {cache_dir}: the caches still need {format_bytes(needed)}, but the disk has "
            f"{format_bytes(free)} free ({'; '.join(lines)}). Free some space, give a --cache_dir on a larger disk, or "
            "train on fewer prompts."
        )


def fill(work: Work, world: World, begin: Callable[[], Compute]) -> None:
    """Builds what is missing, on all ranks together; afterwards every rank sees all items.

    Args:
        work: what is to be built.
        world: the ranks; each calls this.
        begin: called on every rank, and only if something is missing: loads what computing needs, and returns the
            function that gives the items of a batch of keys. That function is called equally often on every rank; a
            rank without work repeats a batch and its result is dropped, as teachers spread over ranks need them in
            step.

    Raises:
        DoesNotFit: the disk is full.
        ConfigError: a rank does not see what the others wrote.
        Interrupted: Ctrl-C; what was computed is written.
    """
    missing, total = work.store.missing(work.keys)
    if not missing:
        return
    work.store.begin_writing()
    # Nobody writes before everybody has looked, or ranks would disagree about what is missing.
    world.barrier()
    try:
        _compute(work, missing, total, world, begin())
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"stopped by Ctrl-C while building {work.title}: what was computed is kept in {work.store.folder}, and the "
            "same command goes on from there."
        ) from error
    world.barrier()
    work.store.refresh()
    unseen, _ = work.store.missing(missing)
    if unseen:
        raise ConfigError(
            f"Rank {world.rank} does not see {len(unseen)} of the items that the ranks wrote to {work.store.folder}: "
            "--cache_dir must be on storage that all ranks share."
        )


def _compute(work: Work, missing: list[str], total: int, world: World, compute: Compute) -> None:
    size = min(work.batch_size, total)
    began = time.monotonic()
    progress = Progress(work.title, total, start=total - len(missing), enabled=world.is_main)
    with progress, work.store.writer() as writer:
        for number, (keys, kept) in enumerate(rounds(missing, size, world.rank, world.size)):
            items = compute(keys)
            for key, item in zip(keys[:kept], items[:kept], strict=True):
                writer.add(key, item)
            writer.flush_if_due()
            before, done = (min(count * size * world.size, len(missing)) for count in (number, number + 1))
            progress.update(done - before)
            if number == 0:
                _announce(work, len(missing) - done, (time.monotonic() - began) / done, world)


def rounds(missing: Sequence[str], size: int, rank: int, world: int) -> Iterator[tuple[list[str], int]]:
    """One rank's batches: `size` keys each, and how many of these count.

    The last batch is filled up with repeats; a rank that has none in the last round repeats the first, and none of it
    counts.
    """
    batches = [list(missing[start : start + size]) for start in range(0, len(missing), size)]
    for number in range(math.ceil(len(batches) / world)):
        index = number * world + rank
        batch = batches[index] if index < len(batches) else []
        filled = batch or batches[0]
        yield [filled[i % len(filled)] for i in range(size)], len(batch)


def _announce(work: Work, left: int, seconds: float, world: World) -> None:
    """Says after the first round how long the rest takes at its pace."""
    if world.is_main and left * seconds > _SHORT_SECONDS:
        _log.info(
            f"{work.title}: {left} are left, about {left * seconds / 3600:.2f} hours "
            f"({format_seconds(left * seconds)}) at the pace of the first batch: {seconds:.3g} s each with "
            f"{world.size} rank(s), warm-up counted."
        )
