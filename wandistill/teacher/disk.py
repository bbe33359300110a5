"""Placement `disk`: the teacher's blocks are read from its safetensors in every step, ahead of their use.

Only what lies outside the blocks is kept in memory, one copy per node. Host memory beyond it is `--disk_buffer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wandistill.errors import ConfigError
from wandistill.teacher.assembly import Assembly
from wandistill.teacher.base import Teacher
from wandistill.teacher.feeds import Feed, Mapped, ReadAhead, Slots
from wandistill.teacher.host_memory import HostBuffers
from wandistill.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from wandistill.teacher import Setting

_DEFAULT_BLOCKS = 4
# One is computed with or copied from, one is read into.
_FEWEST_BLOCKS = 2
# On a GPU: one is computed with, one is filled. The disk is the slower part, so more would not help.
_SLOTS = 2


def build(setting: Setting) -> Teacher:
    """Reads blocks of the expert in use only; a GPU gets them through two slots, a CPU computes with them in place."""
    parts = Assembly(setting, setting.world.device, direct=True)
    layout, device = parts.layout, parts.device
    try:
        count = _buffer_blocks(setting.config.disk_buffer, layout.block.size, parts.reader.staging_bytes)
    except ConfigError:
        parts.reader.close()
        raise
    copy = parts.host_copy(layout.outer_records)
    buffers = HostBuffers(layout.block.size, count, device)
    blocks: Feed = ReadAhead(parts.reader.read, buffers.tensors)
    outer: Feed = Mapped(copy)
    if device.type == "cuda":
        blocks = Slots(blocks, layout.block.size, _SLOTS, device, parts.stream)
        outer = parts.outer_slot(copy)
    return parts.engine(outer, blocks, closing=[parts.reader.close, buffers.close, copy.close])


def _buffer_blocks(setting: str, block: int, staging: int) -> int:
    """Blocks that `--disk_buffer` holds beside the pieces that are being read."""
    if not setting:
        return _DEFAULT_BLOCKS
    size = parse_bytes(setting)
    count = (size - staging) // block
    if count < _FEWEST_BLOCKS:
        least = _FEWEST_BLOCKS * block + staging
        raise ConfigError(
            f"--disk_buffer {setting}: holds {max(count, 0)} blocks of this teacher, and reading ahead takes "
            f"{_FEWEST_BLOCKS}, of {format_bytes(block)} each, and {format_bytes(staging)} for the reads: give at "
            f"least {least} bytes ({format_bytes(least)})."
        )
    return count
