"""Placement `sequential`: rank 0 of each node filled with blocks, then rank 1, and so on, a pipeline through them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wandistill import device_map
from wandistill.teacher.base import Teacher
from wandistill.teacher.spread import build_pipeline, limits, on_one_rank, sizes
from wandistill.teacher.transport import Transport, node_members

if TYPE_CHECKING:
    from wandistill.teacher import Setting


def build(setting: Setting) -> Teacher:
    """Each rank is filled up to `--max_memory`, or to what its GPU has beside the student."""
    transport = Transport(setting.world, node_members(setting.world))
    placed = device_map.sequential(sizes(setting), limits(setting, transport.members))
    if transport.size == 1:
        return on_one_rank(setting, "there is one rank on the node")
    return build_pipeline(setting, placed, transport)
