"""Placement `gpu`: the whole teacher on each rank's own device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wandistill.teacher.assembly import Assembly
from wandistill.teacher.base import Teacher
from wandistill.teacher.compiled import compile_block
from wandistill.teacher.feeds import Mapped, ReadAhead
from wandistill.teacher.host_memory import HostBuffers
from wandistill.teacher.layout import OUTER, Precision
from wandistill.teacher.resident import ResidentTeacher

if TYPE_CHECKING:
    from wandistill.teacher import Setting


def build(setting: Setting) -> Teacher:
    """With 8-bit storage, or a half dtype on a CPU without kernels for it, blocks are widened one at a time."""
    folder, device = setting.folder, setting.world.device
    precision = Precision.of(setting.dtype, device)
    if precision.stored != precision.compute:
        return _stored(setting)
    models = {expert: folder.load_transformer(expert, setting.dtype, device) for expert in folder.experts}
    if setting.config.teacher_compile:
        for model in models.values():
            for block in model.blocks:
                compile_block(block)
    return ResidentTeacher(
        models, device, expand_timesteps=folder.expand_timesteps, micro_batch=setting.config.teacher_micro_batch
    )


def _stored(setting: Setting) -> Teacher:
    """Every block stays on the device as it is stored, and is turned to the compute dtype when its turn comes."""
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
