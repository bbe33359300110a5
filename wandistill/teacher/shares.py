"""Every block of a teacher shared out over the ranks of a node, by whole parameters.

Whole parameters are used in place by the rank that holds them, so only the other ranks' parts of a block are copied
before its turn. They balance over the teacher, not in each block: what one rank has too much of in a block, another
has in the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from wandistill.teacher.layout import OUTER, Field, Record, RecordLayout, TeacherLayout
from wandistill.teacher.parts import layout_of_fields


@dataclass(frozen=True)
class Shares:
    """Who holds what; alike for every expert.

    Args:
        layout: the whole teacher.
        parts: block index, or `OUTER` -> what each member holds of it.
    """

    layout: TeacherLayout
    parts: dict[int, list[RecordLayout]]

    @classmethod
    def of(cls, layout: TeacherLayout, members: int) -> Shares:
        """Gives each parameter, with its scales, to the member that holds the least so far."""
        held = [0] * members
        parts = {}
        for block in (OUTER, *range(layout.blocks)):
            fields = (layout.outer if block == OUTER else layout.block).fields
            groups = [_with_scales(fields, field) for field in fields.values() if not field.name.endswith(".scale")]
            given: list[list[Field]] = [[] for _ in range(members)]
            for group in sorted(groups, key=_bytes, reverse=True):
                member = held.index(min(held))
                given[member] += group
                held[member] += _bytes(group)
            parts[block] = [layout_of_fields(own) for own in given]
        return cls(layout, parts)

    def offsets(self, member: int) -> dict[Record, int]:
        """Where each record's part begins in a member's memory."""
        offsets, end = {}, 0
        for record in self.layout.records:
            offsets[record] = end
            end += self.parts[record.block][member].size
        return offsets

    def size(self, member: int) -> int:
        """Bytes of a member's memory."""
        return sum(self.parts[record.block][member].size for record in self.layout.records)


def joined(parts: Iterable[RecordLayout]) -> RecordLayout:
    """One record that has `parts` one after the other."""
    fields, end = {}, 0
    for part in parts:
        fields.update({name: replace(field, begin=field.begin + end) for name, field in part.fields.items()})
        end += part.size
    return RecordLayout(fields, end)


def _with_scales(fields: Mapping[str, Field], field: Field) -> list[Field]:
    scale = fields.get(f"{field.name}.scale")
    return [field] if scale is None else [field, scale]


def _bytes(fields: Sequence[Field]) -> int:
    return sum(field.end - field.begin for field in fields)
