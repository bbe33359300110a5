"""Bytes of the teacher's units as `wandistill.teacher.layout` packs them: a record for each block, one for the rest.

Tensors begin at multiples of 256 bytes, records at pages. With 8-bit storage the matrices of the blocks are 8-bit with
a float32 scale for each row, everything else bfloat16; Wan's float32 parts are float32 in every dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from wandistill.architecture import WanArchitecture
from wandistill.device_map import BYTES_PER_ELEMENT, HEAD_MODULES
from wandistill.planner.parameters import ParameterTensor, block_tensors, outer_tensors

_TENSOR = 256
_RECORD = 4096


@dataclass(frozen=True)
class TeacherBytes:
    """One expert in one dtype."""

    block: int  # as stored
    wide: int  # as computed with, where that is not how it is stored; else 0
    outer: int  # outside the blocks
    embedding: int  # of which before the blocks
    head: int  # and after them
    float32: int  # of all of it: what stays float32
    largest: int  # elements of the largest tensor
    layers: int

    @property
    def total(self) -> int:
        """All units."""
        return self.layers * self.block + self.outer

    @property
    def units(self) -> list[int]:
        """Embedding, blocks, head."""
        return [self.embedding, *[self.block] * self.layers, self.head]


@lru_cache(maxsize=512)
def teacher_bytes(architecture: WanArchitecture, dtype: str, compute: int) -> TeacherBytes:
    """The records of one expert of a teacher stored in `dtype`, whose modules hold `compute` bytes an element."""
    eight_bit = BYTES_PER_ELEMENT[dtype] == 1
    stored = 2 if eight_bit else BYTES_PER_ELEMENT[dtype]
    block, outer = block_tensors(architecture), outer_tensors(architecture)
    head = [tensor for tensor in outer if tensor.name.startswith(HEAD_MODULES)]
    embedding = [tensor for tensor in outer if not tensor.name.startswith(HEAD_MODULES)]
    return TeacherBytes(
        block=_record(_sizes(block, stored, eight_bit)),
        wide=_record(_sizes(block, compute, False)) if eight_bit or stored != compute else 0,
        outer=_record(_sizes(outer, compute, False)),
        embedding=_record(_sizes(embedding, compute, False)),
        head=_record(_sizes(head, compute, False)),
        float32=4 * sum(t.numel for t in outer if t.float32)
        + architecture.num_layers * 4 * sum(t.numel for t in block if t.float32),
        largest=max(tensor.numel for tensor in (*block, *outer)),
        layers=architecture.num_layers,
    )


@dataclass(frozen=True)
class ShardBytes:
    """A teacher shared out over the ranks of a node by whole parameters, all experts alike."""

    own: tuple[int, ...]  # of each rank
    slot: int  # the others' parts of a block, the most of any rank and block
    outer: int  # all parts of what lies outside the blocks of one expert

    @property
    def memory(self) -> int:
        """What each rank takes: the parts are in memory of one size."""
        return max(self.own)


@lru_cache(maxsize=512)
def shard_bytes(architecture: WanArchitecture, dtype: str, compute: int, ranks: int, experts: int) -> ShardBytes:
    """The shares of `wandistill.teacher.shares`: each parameter goes to the rank that holds the least so far."""
    eight_bit = BYTES_PER_ELEMENT[dtype] == 1
    stored = 2 if eight_bit else BYTES_PER_ELEMENT[dtype]
    outer = _groups(outer_tensors(architecture), compute, False)
    block = _groups(block_tensors(architecture), stored, eight_bit)
    held, memory, slot, outer_size = [0] * ranks, [0] * ranks, 0, 0
    for number in range(architecture.num_layers + 1):
        parts: list[list[int]] = [[] for _ in range(ranks)]
        for group in block if number else outer:
            rank = held.index(min(held))
            parts[rank] += group
            held[rank] += sum(group)
        sizes = [_record(part) for part in parts]
        memory = [total + experts * size for total, size in zip(memory, sizes, strict=True)]
        if number:
            slot = max(slot, sum(sizes) - min(sizes))
        else:
            outer_size = sum(sizes)
    return ShardBytes(tuple(memory), slot, outer_size)


def _groups(tensors: Iterable[ParameterTensor], width: int, eight_bit: bool) -> list[list[int]]:
    """Bytes of each parameter with its scales, the largest first."""
    groups = []
    for tensor in tensors:
        scaled = eight_bit and not tensor.float32 and len(tensor.shape) == 2
        size = (4 if tensor.float32 else 1 if scaled else width) * tensor.numel
        groups.append([size, 4 * tensor.shape[0]] if scaled else [size])
    return sorted(groups, key=sum, reverse=True)


def _sizes(tensors: Iterable[ParameterTensor], width: int, eight_bit: bool) -> list[int]:
    return [size for group in _groups(tensors, width, eight_bit) for size in group]


def _record(sizes: Sequence[int]) -> int:
    end = 0
    for size in sizes:
        end = _align(end, _TENSOR) + size
    return _align(end, _RECORD)


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
