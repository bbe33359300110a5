"""How a teacher's weights lie in memory: one flat record for each block, one for what lies outside the blocks.

A record is one range of bytes, so that a block moves with one copy, wherever it comes from and goes to. Parameters in
the teacher's dtype come first, Wan's float32 parameters after them in a segment of their own; with 8-bit storage the
scales are in that segment too. All blocks of all experts have the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wandistill.architecture import WanArchitecture
from wandistill.models.weights import with_one_block
from wandistill.teacher.base import Expert
from wandistill.teacher.resident import cpu_computes

# Index of the record that holds what lies outside the blocks.
OUTER = -1
# Bytes: tensors begin where the widest load of a GPU kernel and a CPU's cache line do, records where a page does.
_TENSOR_ALIGNMENT = 256
_RECORD_ALIGNMENT = 4096
_EIGHT_BIT = (torch.int8, torch.float8_e4m3fn)


class Record(NamedTuple):
    """One block of one expert, or with block `OUTER` what lies outside its blocks."""

    expert: Expert
    block: int

    @classmethod
    def of(cls, expert: Expert, name: str) -> tuple[Record, str]:
        """The record of the tensor `name` in the expert's files, and the tensor's name within it."""
        if not name.startswith("blocks."):
            return cls(expert, OUTER), name
        _, block, own = name.split(".", 2)
        return cls(expert, int(block)), own

    @property
    def prefix(self) -> str:
        """What precedes, in the expert's files, the name that a tensor has within the record."""
        return "" if self.block == OUTER else f"blocks.{self.block}."


@dataclass(frozen=True)
class Precision:
    """The dtypes of a teacher, Wan's float32 parameters apart."""

    stored: torch.dtype  # of the Linear weights in the blocks
    values: torch.dtype  # what every parameter is rounded to: `stored`, or bfloat16 with 8-bit storage
    compute: torch.dtype  # what the modules hold: `values`, or float32 on a CPU that does not compute in them

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device) -> Precision:
        """The precision of a teacher stored in `dtype` and computed on `device`."""
        values = torch.bfloat16 if dtype in _EIGHT_BIT else dtype
        wide = device.type == "cpu" and not cpu_computes(values)
        return cls(dtype, values, torch.float32 if wide else values)


@dataclass(frozen=True)
class Field:
    """One tensor in a record."""

    name: str  # of the parameter within its module; NAME.scale: the scales of the rows of parameter NAME
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int  # first byte in the record
    values: torch.dtype  # precision that the numbers are rounded to before they are put in `dtype`

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.begin + math.prod(self.shape) * self.dtype.itemsize

    @property
    def scaled(self) -> bool:
        """Whether the rows are 8-bit numbers, each row with a scale."""
        return self.dtype in _EIGHT_BIT

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether numbers of `dtype` are the same here: neither rounded nor scaled. `dtype` alone does not tell, since
        a wide field holds what was rounded to `values` before."""
        return not self.scaled and torch.promote_types(dtype, self.values) == self.values


@dataclass(frozen=True)
class RecordLayout:
    """The tensors of a record."""

    fields: Mapping[str, Field]
    size: int  # bytes, a multiple of the page size

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors in `buffer`, uint8 [size]; they share its memory."""
        return {name: self.view(field, buffer) for name, field in self.fields.items()}

    @staticmethod
    def view(field: Field, buffer: Tensor) -> Tensor:
        """One tensor in `buffer`."""
        return buffer[field.begin : field.end].view(field.dtype).view(field.shape)


@dataclass(frozen=True)
class TeacherLayout:
    """The records of a teacher."""

    experts: tuple[Expert, ...]
    blocks: int
    block: RecordLayout  # as a block is stored
    wide: RecordLayout | None  # as a block is computed with, where that is not how it is stored
    outer: RecordLayout  # always as it is computed with: it is small, and need never be converted

    @classmethod
    def of(cls, experts: Iterable[Expert], config: Mapping[str, Any], precision: Precision) -> TeacherLayout:
        """The layout of a teacher with a transformer's config.json."""
        model = with_one_block(config)
        keep = frozenset(model._keep_in_fp32_modules or ())
        parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        prefix = "blocks.0."
        inside = {n.removeprefix(prefix): shape for n, shape in parameters.items() if n.startswith(prefix)}
        outside = {name: shape for name, shape in parameters.items() if not name.startswith("blocks.")}

        def stored(shape: tuple[int, ...]) -> torch.dtype:
            return precision.stored if len(shape) == 2 else precision.values

        def computed(shape: tuple[int, ...]) -> torch.dtype:
            return precision.compute

        return cls(
            tuple(experts),
            WanArchitecture.from_config(config).num_layers,
            _pack(inside, keep, precision, stored),
            None if precision.stored == precision.compute else _pack(inside, keep, precision, computed),
            _pack(outside, keep, precision, computed),
        )

    def layout_of(self, record: Record) -> RecordLayout:
        """The layout of one record."""
        return self.outer if record.block == OUTER else self.block

    @property
    def outer_records(self) -> list[Record]:
        """What lies outside the blocks, of each expert."""
        return [Record(expert, OUTER) for expert in self.experts]

    @property
    def records(self) -> list[Record]:
        """All records, each expert's together."""
        return [Record(expert, block) for expert in self.experts for block in (OUTER, *range(self.blocks))]


def _pack(
    parameters: Mapping[str, tuple[int, ...]],
    keep: frozenset[str],
    precision: Precision,
    dtype_of: Callable[[tuple[int, ...]], torch.dtype],
) -> RecordLayout:
    """Puts `parameters` one after the other: those in the teacher's dtype, then the float32 ones."""
    narrow: list[tuple[str, tuple[int, ...], torch.dtype, torch.dtype]] = []
    wide: list[tuple[str, tuple[int, ...], torch.dtype, torch.dtype]] = []
    for name, shape in parameters.items():
        # The rule of diffusers' loader (0.42, load_model_dict_into_meta): a part of the name is in the list.
        if keep.intersection(name.split(".")):
            wide.append((name, shape, torch.float32, torch.float32))
            continue
        dtype = dtype_of(shape)
        narrow.append((name, shape, dtype, precision.values))
        if dtype in _EIGHT_BIT:
            wide.append((f"{name}.scale", shape[:1], torch.float32, torch.float32))
    fields: dict[str, Field] = {}
    end = 0
    for name, shape, dtype, values in narrow + wide:
        field = Field(name, shape, dtype, _align(end, _TENSOR_ALIGNMENT), values)
        fields[name], end = field, field.end
    return RecordLayout(fields, _align(end, _RECORD_ALIGNMENT))


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
