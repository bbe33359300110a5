"""The split fetch of `stream`: a node's N ranks copy 1/N of each record from the host, and give each other their parts.

Each part crosses the host's links once, whatever the number of ranks. The parts are gathered in place, in the slots, on
a stream of their own: beside compute, and beside the copy of the record that is next. A collective is what orders the
ranks here: it reads a part once its owner has it, and a slot is filled anew once its record was computed with, after
the gather that read it. So ranks go in step, record by record.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wandistill.teacher.copy_stream import CopyStream, Mark
from wandistill.teacher.transport import Transport

# Bytes: parts begin where copies and NCCL run at full speed.
_ALIGNMENT = 256


def slot_size(record: int, members: int) -> int:
    """Bytes of a slot for a record of `record` bytes: as many for each member, so up to 256 a member more."""
    return -(-record // (members * _ALIGNMENT)) * _ALIGNMENT * members


class SplitStream(CopyStream):
    """Copies to slots in which all members of `transport` take part: they copy the same records in the same order."""

    def __init__(self, device: torch.device, transport: Transport) -> None:
        super().__init__(device)
        self._transport = transport
        self._gathers = CopyStream(device)

    def copy(self, target: Tensor, source: Tensor, after: Mark | None) -> Mark | None:
        """Brings `source` to the slot `target` once `after` has passed; returns the point at which all of it is there.

        Args:
            source: the record, the same bytes on every member; this rank reads its part alone.
            target: of `slot_size` bytes; what exceeds the record is not to be read.
        """
        parts = target.view(self._transport.size, -1)
        begin = self._transport.index * parts.shape[1]
        own = source[begin : begin + parts.shape[1]]
        copied = super().copy(parts[self._transport.index, : len(own)], own, after)
        return self._gathers.run(lambda: self._transport.gather(parts), copied)

    def synchronize(self) -> None:
        """Waits on the host until all copies are done, and the gathers, which the other members must take part in."""
        super().synchronize()
        self._gathers.synchronize()
