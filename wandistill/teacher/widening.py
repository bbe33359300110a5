"""Turning a block as it is stored to one that can be computed with, when its turn comes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from wandistill.models.held import hold
from wandistill.teacher.layout import TeacherLayout
from wandistill.teacher.quantize import dequantize_rows


class Widening:
    """One buffer on the compute device that blocks are turned into, one after the other.

    Args:
        layout: of a teacher whose blocks are not stored as they are computed with.
    """

    def __init__(self, layout: TeacherLayout, device: torch.device) -> None:
        assert layout.wide is not None
        self._layout = layout
        self.record = torch.empty(layout.wide.size, dtype=torch.uint8, device=device)  # in the layout `wide`
        hold("slots", [self.record])
        targets = layout.wide.views(self.record)
        fields = layout.block.fields
        self._scaled = {name: target for name, target in targets.items() if fields[name].scaled}
        # The others by their dtypes, since a copy of many tensors is one kernel where those are the same.
        self._plain: dict[tuple[torch.dtype, torch.dtype], dict[str, Tensor]] = {}
        for name, target in targets.items():
            if name not in self._scaled:
                self._plain.setdefault((fields[name].dtype, target.dtype), {})[name] = target

    def turn(self, stored: Mapping[str, Tensor]) -> None:
        """Puts a block, its tensors in the layout `block`, in `record`."""
        for name, target in self._scaled.items():
            dequantize_rows(stored[name], stored[f"{name}.scale"], target)
        for targets in self._plain.values():
            torch._foreach_copy_(list(targets.values()), [stored[name] for name in targets])
