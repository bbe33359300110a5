"""Which rank holds which part of the teacher: spread by bytes, filled up in order, or read from a file. No torch.

A teacher of n blocks has n + 2 units in the order of the forward pass: the embedding, the n blocks, the head (output
norm and projection). A device map gives each unit a place, `wandistill.teacher.pipeline` runs them there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from wandistill.architecture import WanArchitecture
from wandistill.errors import ConfigError, DoesNotFit
from wandistill.planner.parameters import block_tensors, count, outer_tensors
from wandistill.units import format_bytes

# Modules outside the blocks, by the unit that they belong to.
EMBEDDING_MODULES = ("patch_embedding", "condition_embedder", "rope")
HEAD_MODULES = ("norm_out", "proj_out", "scale_shift_table")

STORES = ("cpu", "disk")
BYTES_PER_ELEMENT = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8": 1}

_BLOCKS = re.compile(r"(?:blocks\.)?(\d+)(?:\s*-\s*(\d+))?")


class Place(NamedTuple):
    """Where a unit is."""

    rank: int  # the rank that computes it
    store: str = "device"  # where its weights lie: the rank's device, `cpu` (host memory) or `disk`


DeviceMap = tuple[Place, ...]  # one place for each unit: embedding, blocks in order, head


class Run(NamedTuple):
    """Consecutive units in one place."""

    units: range
    place: Place


def runs(device_map: DeviceMap) -> list[Run]:
    """The map as runs of consecutive units, in the order of the forward pass."""
    found, start = [], 0
    for place, group in groupby(device_map):
        stop = start + len(list(group))
        found.append(Run(range(start, stop), place))
        start = stop
    return found


def unit_bytes(architecture: WanArchitecture, dtype: str, experts: int) -> list[int]:
    """Bytes of each unit of all experts in `dtype`, Wan's float32 parts counted as such."""
    outer, block = outer_tensors(architecture), block_tensors(architecture)
    head = [t for t in outer if t.name.startswith(HEAD_MODULES)]
    embedding = [t for t in outer if not t.name.startswith(HEAD_MODULES)]

    def size(tensors: Sequence) -> int:
        narrow, wide = count(tensors, float32=False), count(tensors, float32=True)
        return experts * (narrow * BYTES_PER_ELEMENT[dtype] + wide * BYTES_PER_ELEMENT["float32"])

    return [size(embedding), *[size(block)] * architecture.num_layers, size(head)]


def balanced(sizes: Sequence[int], limits: Sequence[int | None]) -> DeviceMap:
    """Consecutive units on each rank so that the fullest rank holds as little as it can.

    Args:
        sizes: bytes of each unit.
        limits: most bytes on each rank, None where there is no limit.

    Raises:
        DoesNotFit: the limits leave too little room.
    """
    low, high = max(sizes), sum(sizes)
    if _fill(sizes, limits) is None:
        raise _too_small(sizes, limits)
    while low < high:
        middle = (low + high) // 2
        fits = _fill(sizes, [middle if limit is None else min(middle, limit) for limit in limits]) is not None
        low, high = (low, middle) if fits else (middle + 1, high)
    filled = _fill(sizes, [high if limit is None else min(high, limit) for limit in limits])
    assert filled is not None
    return filled


def sequential(sizes: Sequence[int], limits: Sequence[int | None]) -> DeviceMap:
    """Rank 0 filled up to its limit, then rank 1, and so on; arguments and error as for `balanced`."""
    filled = _fill(sizes, limits)
    if filled is None:
        raise _too_small(sizes, limits)
    return filled


def _fill(sizes: Sequence[int], limits: Sequence[int | None]) -> DeviceMap | None:
    """Units placed one after the other, the next rank when a limit is reached; None if the last one is full."""
    places, rank, used = [], 0, 0
    for size in sizes:
        while rank < len(limits):
            limit = limits[rank]
            if limit is None or used + size <= limit:
                break
            rank, used = rank + 1, 0
        if rank == len(limits):
            return None
        places.append(Place(rank))
        used += size
    return tuple(places)


def _too_small(sizes: Sequence[int], limits: Sequence[int | None]) -> DoesNotFit:
    room = ", ".join("no limit" if limit is None else format_bytes(limit) for limit in limits)
    return DoesNotFit(
        f"The teacher's {format_bytes(sum(sizes))} do not fit on {len(limits)} ranks with room for {room}, block by "
        f"block ({format_bytes(max(sizes))} the largest): raise --max_memory, use more GPUs, a smaller --teacher_dtype "
        "(int8), or --teacher_device_strategy stream, which keeps the blocks in host memory."
    )


def read_device_map(path: Path, layers: int, ranks: int) -> DeviceMap:
    """The map in the JSON or YAML file of `--teacher_device_map`.

    Keys are blocks (`7`, `0-19`, `blocks.7`, `blocks.0-19`) or modules outside the blocks (`patch_embedding`,
    `condition_embedder`, `norm_out`, `proj_out`, ...), values a rank, `cpu` (host memory) or `disk`. Modules that are
    not named go with the first block (embedding) or the last (head). What lies on `cpu` or `disk` is brought to and
    computed on the rank that holds the units before it, or, at the start, on the first rank named after it.

    Args:
        layers: number of the teacher's blocks.
        ranks: number of ranks; they are counted from 0.

    Raises:
        ConfigError: a block is missing or named twice, a rank does not exist, or the file says something else that
            cannot be; the message names it.
    """
    named: dict[int, tuple[str, str]] = {}  # unit -> the key that names it, its value
    modules: dict[str, str] = {}
    for key, value in _entries(path):
        where = f"--teacher_device_map {path}: '{key}: {value}'"
        if value not in STORES and not (value.isdigit() and int(value) < ranks):
            known = f"rank {ranks - 1}" if ranks == 1 else f"ranks 0 to {ranks - 1}"
            raise ConfigError(f"{where} names no place: the job has {known}; beside them there are cpu and disk.")
        if key in (*EMBEDDING_MODULES, *HEAD_MODULES):
            units: Sequence[int] = [0 if key in EMBEDDING_MODULES else layers + 1]
            if key in modules:
                raise ConfigError(f"{where}: {key} is named twice; name it once.")
            modules[key] = value
            former = named.get(units[0])
            if former is not None and former[1] != value:
                raise ConfigError(
                    f"{where}: {key} must be with {former[0]}, which is on {former[1]}: the embedding is one part, "
                    "and so is the head."
                )
        else:
            units = [block + 1 for block in _blocks(key, where, layers)]
            twice = [unit - 1 for unit in units if unit in named]
            if twice:
                other = named[twice[0] + 1][0]
                raise ConfigError(f"{where}: {_ranges(twice)} named twice, by '{other}' too; name every block once.")
        named.update({unit: (key, value) for unit in units})
    missing = [block for block in range(layers) if block + 1 not in named]
    if missing:
        raise ConfigError(
            f"--teacher_device_map {path}: {_ranges(missing)} missing; the teacher has blocks 0 to {layers - 1}, and "
            "each needs a place."
        )
    named.setdefault(0, named[1])
    named.setdefault(layers + 1, named[layers])
    return _placed([named[unit][1] for unit in range(layers + 2)])


def _placed(values: Sequence[str]) -> DeviceMap:
    """Places from values; a stored unit is computed by the rank before it, at the start by the first rank after."""
    rank = next((int(value) for value in values if value not in STORES), 0)
    places = []
    for value in values:
        rank = rank if value in STORES else int(value)
        places.append(Place(rank, value) if value in STORES else Place(rank))
    return tuple(places)


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    """The file's pairs as texts, repeated keys included (which the parsers of both formats would hide)."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--teacher_device_map {path}: cannot be read ({error}); give a JSON or YAML file."
        ) from error
    fault = "must map blocks to ranks, such as '0-19: 0'"
    try:
        if path.suffix == ".json":
            pairs = json.loads(text, object_pairs_hook=lambda found: found)
            if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
                raise ConfigError(f"--teacher_device_map {path}: {fault}.")
            yield from ((str(key).strip(), str(value).strip()) for key, value in pairs)
            return
        node = yaml.compose(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--teacher_device_map {path}: is neither JSON nor YAML: {error}") from error
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"--teacher_device_map {path}: {fault}.")
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or not isinstance(value, yaml.ScalarNode):
            raise ConfigError(f"--teacher_device_map {path}: line {key.start_mark.line + 1}: {fault}.")
        yield key.value.strip(), value.value.strip()


def _blocks(key: str, where: str, layers: int) -> range:
    match = _BLOCKS.fullmatch(key)
    if match is None:
        modules = ", ".join((*EMBEDDING_MODULES, *HEAD_MODULES))
        raise ConfigError(f"{where}: names no part of the teacher; write blocks as '7' or '0-19', or one of {modules}.")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ConfigError(f"{where}: the range runs backwards; write the smaller block first.")
    if last >= layers:
        raise ConfigError(f"{where}: the teacher has blocks 0 to {layers - 1}, no block {last}.")
    return range(first, last + 1)


def _ranges(blocks: Sequence[int]) -> str:
    """`blocks` in words with their verb: `block 3 is`, `blocks 3, 5-7 are`."""
    parts = []
    for _, group in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        members = [block for _, block in group]
        parts.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else f"{members[0]}")
    return f"block {parts[0]} is" if len(blocks) == 1 else f"blocks {', '.join(parts)} are"
