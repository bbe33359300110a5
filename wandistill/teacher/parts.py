"""The part of a teacher that one rank holds, read from the safetensors without reading the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wandistill.models.held import hold
from wandistill.teacher.copy_stream import Mark
from wandistill.teacher.host_memory import HostBuffers
from wandistill.teacher.layout import Field, Record, RecordLayout, TeacherLayout
from wandistill.teacher.record_reader import RecordReader

if TYPE_CHECKING:
    from wandistill.models.wan import WanFolder

# Bytes: as in whole records, tensors begin where the widest load of a GPU kernel does.
_ALIGNMENT = 256


def aligned(position: int) -> int:
    """The first place for a tensor from `position` on."""
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def layout_of_fields(fields: Iterable[Field]) -> RecordLayout:
    """A record that holds `fields` alone, one after the other."""
    placed, end = {}, 0
    for field in fields:
        begin = aligned(end)
        end = begin + field.end - field.begin
        placed[field.name] = replace(field, begin=begin)
    return RecordLayout(placed, aligned(end))


@dataclass(frozen=True)
class PartialLayout(TeacherLayout):
    """A teacher's records, of which some are held in part."""

    held: Mapping[Record, RecordLayout]

    @classmethod
    def within(cls, layout: TeacherLayout, held: Mapping[Record, RecordLayout]) -> PartialLayout:
        """`layout`, with `held` in place of the records that it names."""
        return cls(layout.experts, layout.blocks, layout.block, layout.wide, layout.outer, held)

    def layout_of(self, record: Record) -> RecordLayout:
        """What is held of one record."""
        return self.held[record] if record in self.held else super().layout_of(record)


def open_reader(folder: WanFolder, layout: TeacherLayout, *, ranks: int, direct: bool = False) -> RecordReader:
    """Reads the records of `layout` from a teacher's folder; checks that the weights are those of its config.

    Args:
        ranks: of this node.
        direct: past the page cache.
    """
    folders = {expert: folder.path / expert.value for expert in folder.experts}
    return RecordReader(folders, layout, direct=direct, ranks=ranks)


Read = Callable[[Record, Tensor], None]  # puts a record in a buffer on the CPU, uint8


def load(read: Read, sizes: Mapping[Record, int], device: torch.device) -> dict[Record, Tensor]:
    """Records of these sizes in bytes on `device`, each in memory of its own."""
    loaded = {record: torch.empty(size, dtype=torch.uint8, device=device) for record, size in sizes.items()}
    hold("teacher", loaded.values())
    read_into(read, loaded, device)
    return loaded


def read_into(read: Read, targets: Mapping[Record, Tensor], device: torch.device) -> None:
    """Fills each target, uint8 [size of the record] on `device`; a GPU's through one buffer of host memory."""
    if device.type == "cpu":
        for record, target in targets.items():
            read(record, target)
        return
    staging = HostBuffers(max(len(target) for target in targets.values()), 1, device)
    for record, target in targets.items():
        read(record, staging.tensors[0])
        target.copy_(staging.tensors[0][: len(target)])
    staging.close()


class Held:
    """A feed of records that lie in memory for good."""

    def __init__(self, records: Mapping[Record, Tensor]) -> None:
        self._records = dict(records)
        self._expected: deque[Record] = deque()

    def expect(self, records: Sequence[Record]) -> None:
        self._expected.extend(records)

    def take(self, wait: bool = True) -> Tensor | None:
        return self._records[self._expected.popleft()]

    def give(self, done: Mark | None) -> None:
        """Nothing to do: the record stays where it is."""

    def close(self) -> None:
        """Lets the memory go."""
        self._records.clear()


def shifted(read: Read, first: int) -> Read:
    """`read` for records that count the blocks from `first` on."""
    return lambda record, buffer: read(Record(record.expert, record.block + first), buffer)
