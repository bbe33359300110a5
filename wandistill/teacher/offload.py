"""Placement `offload`: one host copy per node, one block at a time on each rank's GPU: the least GPU memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wandistill.teacher.assembly import build_from_host_copy
from wandistill.teacher.base import Teacher

if TYPE_CHECKING:
    from wandistill.teacher import Setting


def build(setting: Setting) -> Teacher:
    """Streams through one slot, so copy and compute take turns."""
    return build_from_host_copy(setting, slots=1, resident_blocks=0)
