"""The whole teacher in 8 bits on each rank's own device: what `gpu` is with `--teacher_dtype int8` or `float8`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wandistill.teacher.assembly import Assembly
from wandistill.teacher.base import Teacher
from wandistill.teacher.feeds import Mapped, ReadAhead
from wandistill.teacher.host_memory import HostBuffers
from wandistill.teacher.layout import OUTER

if TYPE_CHECKING:
    from wandistill.teacher import Setting


def build(setting: Setting) -> Teacher:
    """Every block stays on the device, and is turned to the compute dtype when its turn comes."""
    parts = Assembly(setting, setting.world.device, direct=False)
    layout, device = parts.layout, parts.device
    copy = parts.host_copy(layout.outer_records)
    buffers = HostBuffers(layout.block.size, 2, device)
    source = ReadAhead(parts.reader.read, buffers.tensors)
    resident = parts.keep(source, [record for record in layout.records if record.block != OUTER])
    source.close()
    parts.reader.close()
    buffers.close()
    # No block is ever asked of the feed.
    return parts.engine(parts.outer_slot(copy), Mapped(copy), resident, [copy.close])
