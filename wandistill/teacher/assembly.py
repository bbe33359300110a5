"""Putting the engine together: what the placements cpu, offload, stream and disk share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from wandistill.errors import ConfigError
from wandistill.models.held import hold
from wandistill.models.weights import with_one_block
from wandistill.teacher.base import Teacher
from wandistill.teacher.copy_stream import CopyStream
from wandistill.teacher.engine import BlockEngine, Blocks, OuterPart
from wandistill.teacher.feeds import Feed, Mapped, ReadAhead, Slots
from wandistill.teacher.host_copy import HostCopy, SharePlace, load_host_copy
from wandistill.teacher.host_memory import HostBuffers
from wandistill.teacher.layout import Precision, Record, TeacherLayout
from wandistill.teacher.lockstep import LockstepTeacher
from wandistill.teacher.record_reader import RecordReader
from wandistill.teacher.split_fetch import SplitStream, slot_size
from wandistill.teacher.transport import Transport, node_members
from wandistill.units import format_bytes

if TYPE_CHECKING:
    from wandistill.teacher import Setting

_log = logging.getLogger(__name__)

# Pinned buffers through which a host copy goes that cannot be pinned itself: one is filled, one is copied from.
_BOUNCE_BUFFERS = 2


class Assembly:
    """The parts of one placement.

    Args:
        device: where blocks are computed.
        direct: whether weights are read past the page cache: right for what is read in every step.
    """

    def __init__(self, setting: Setting, device: torch.device, *, direct: bool) -> None:
        folder = setting.folder
        self.setting = setting
        self.device = device
        self.stream = CopyStream(device)
        self.layout = TeacherLayout.of(folder.experts, folder.transformer_config, Precision.of(setting.dtype, device))
        folders = {expert: folder.path / expert.value for expert in folder.experts}
        self.reader = RecordReader(folders, self.layout, direct=direct, ranks=setting.world.local_size)

    def host_copy(self, records: Sequence[Record]) -> HostCopy:
        """One copy of `records` per node; all ranks of the run call this together."""
        setting = self.setting
        size = sum(self.layout.layout_of(record).size for record in records)
        _log.info(f"teacher: {format_bytes(size)} in the memory of each node, shared by its ranks")
        place = SharePlace.of(setting.config)
        return load_host_copy(records, self.layout, self.reader, setting.world, place, self.device)

    def outer_slot(self, copy: HostCopy) -> Feed:
        """The outer parts of `copy` brought to the device, one expert's at a time."""
        return Slots(Mapped(copy), self.layout.outer.size, 1, self.device, self.stream)

    def keep(self, source: Feed, records: Sequence[Record]) -> dict[Record, Tensor]:
        """`records` on the device for good."""
        kept = {}
        source.expect(records)
        for record in records:
            stored = source.take()
            assert stored is not None
            kept[record] = stored.to(self.device, copy=True)
            source.give(None)
        hold("teacher", kept.values())
        return kept

    def engine(
        self,
        outer: Feed,
        blocks: Feed,
        resident: dict[Record, Tensor] | None = None,
        closing: Iterable[Callable[[], None]] = (),
        copy: HostCopy | None = None,
    ) -> BlockEngine:
        """The teacher; closing it closes the feeds, then `closing` in order.

        Args:
            copy: of the whole teacher, where there is one.
        """
        config = self.setting.config
        empty = with_one_block(self.setting.folder.transformer_config)
        empty_block = empty.blocks[0]
        empty.blocks = nn.ModuleList()
        return BlockEngine(
            OuterPart(empty, self.layout, outer, self.stream, self.device),
            Blocks(
                empty_block,
                self.layout,
                blocks,
                resident or {},
                self.stream,
                self.device,
                compiled=config.teacher_compile,
            ),
            self.device,
            expand_timesteps=self.setting.folder.expand_timesteps,
            micro_batch=config.teacher_micro_batch,
            closing=tuple(closing),
            copy=copy,
        )


def build_from_host_copy(setting: Setting, *, slots: int, resident_blocks: int, split: bool = False) -> Teacher:
    """A teacher in one host copy per node, computed on each rank's device through `slots` slots.

    Args:
        resident_blocks: blocks of each expert that stay on the device, spread evenly, so that the copies between them
            have the same time everywhere.
        split: whether the ranks of a node share the fetch.
    """
    parts = Assembly(setting, setting.world.device, direct=False)
    layout, device = parts.layout, parts.device
    if resident_blocks > layout.blocks:
        parts.reader.close()
        raise ConfigError(
            f"--resident_blocks {resident_blocks}: the teacher has {layout.blocks} blocks; give at most as many."
        )
    copy = parts.host_copy(layout.records)
    parts.reader.close()
    source: Feed = Mapped(copy)
    closing = [copy.close]
    if device.type == "cuda" and not copy.pinned:
        bounce = HostBuffers(layout.block.size, _BOUNCE_BUFFERS, device)
        source = ReadAhead(lambda record, buffer: np.copyto(buffer.numpy(), copy.view(record).numpy()), bounce.tensors)
        closing.insert(0, bounce.close)
    kept = [
        Record(expert, number * layout.blocks // resident_blocks)
        for expert in layout.experts
        for number in range(resident_blocks)
    ]
    resident = parts.keep(source, kept)
    transport = _sharing(setting, copy, device) if split else None
    stream, size = parts.stream, layout.block.size
    if transport is not None:
        stream, size = SplitStream(device, transport), slot_size(size, transport.size)
    blocks = Slots(source, size, slots, device, stream)
    engine = parts.engine(parts.outer_slot(copy), blocks, resident, closing, copy)
    return engine if transport is None else LockstepTeacher(engine, transport, layout.blocks)


def _sharing(setting: Setting, copy: HostCopy, device: torch.device) -> Transport | None:
    """What the ranks of a node share the fetch through; None: each fetches alone. All ranks of the job call this."""
    if device.type == "cuda" and not copy.pinned:
        # The buffers in between are filled by threads, at another time on each rank.
        if setting.world.is_main:
            _log.warning("note: --stream_fetch split: the teacher's host copy is not pinned; each rank fetches alone.")
        return None
    transport = Transport(setting.world, node_members(setting.world))
    return transport if transport.size > 1 else None
