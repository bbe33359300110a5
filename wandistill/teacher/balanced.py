"""Placement `balanced`: the blocks spread evenly over the ranks of each node, a pipeline through them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wandistill import device_map
from wandistill.teacher.base import Teacher
from wandistill.teacher.spread import build_pipeline, limits, on_one_rank, sizes
from wandistill.teacher.transport import Transport, node_members

if TYPE_CHECKING:
    from wandistill.teacher import Setting


def build(setting: Setting) -> Teacher:
    """Every rank gets an equal share of the bytes, since every rank has the same student; at most `--max_memory`."""
    transport = Transport(setting.world, node_members(setting.world))
    # Without a limit an equal share is all that balance asks for; whether it fits is the planner's to say.
    most = limits(setting, transport.members) if setting.config.max_memory else [None] * transport.size
    placed = device_map.balanced(sizes(setting), most)
    if transport.size == 1:
        return on_one_rank(setting, "there is one rank on the node")
    return build_pipeline(setting, placed, transport)
