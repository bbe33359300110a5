"""Placement `stream`: one host copy per node, each rank's GPU prefetches the blocks through fixed slots.

With `--stream_fetch own` each rank copies whole blocks; with `split` each copies a part, and gets the rest from its
peers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wandistill.teacher.assembly import build_from_host_copy
from wandistill.teacher.base import Teacher

if TYPE_CHECKING:
    from wandistill.teacher import Setting

# One is computed with, one is full, one is filled: with two the link waits for every block's compute to end. On a CPU
# a copy is done at once.
_SLOTS = {"cuda": 3, "cpu": 2}


def build(setting: Setting) -> Teacher:
    """Streams through fixed slots; `--resident_blocks` of each expert stay on the GPU."""
    slots = _SLOTS[setting.world.device.type]
    config = setting.config
    # What is left to the plan is settled here; with no plan every rank fetches alone and keeps nothing.
    split = config.stream_fetch == "split"
    return build_from_host_copy(setting, slots=slots, resident_blocks=config.kept_blocks or 0, split=split)
