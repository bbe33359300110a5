"""Placement `sharded`: 1/N of every block on each of a node's N ranks; the rest is read from the others, in turn.

Where the GPUs reach each other, a rank copies its peers' parts of a block from their memory, when it likes: frozen
weights change for nobody, so no rank waits for another. Elsewhere (CPUs, GPUs without peer access) the ranks send each
other their parts, in step. Either way the parts go to fixed slots ahead of their use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wandistill.models.held import hold
from wandistill.models.weights import with_one_block
from wandistill.teacher.base import Expert, Teacher
from wandistill.teacher.copy_stream import CopyStream, Mark
from wandistill.teacher.engine import BlockEngine, Blocks, OuterPart, module_of
from wandistill.teacher.layout import OUTER, Precision, Record, RecordLayout, TeacherLayout
from wandistill.teacher.lockstep import LockstepTeacher
from wandistill.teacher.parts import PartialLayout, open_reader, read_into
from wandistill.teacher.peer_memory import PeerMemory, peer_memory
from wandistill.teacher.shares import Shares, joined
from wandistill.teacher.side_stream import SideStream
from wandistill.teacher.spread import on_one_rank
from wandistill.teacher.transport import Message, Transport, node_members

if TYPE_CHECKING:
    from wandistill.teacher import Setting

# One is computed with, one is filled.
_SLOTS = 2


class Shard:
    """This rank's part of the teacher, and the way to the others' parts."""

    def __init__(self, shares: Shares, memory: PeerMemory, transport: Transport, device: torch.device) -> None:
        self.shares, self.here = shares, transport.index
        self._memory, self._transport = memory, transport
        self._offsets = [shares.offsets(member) for member in range(transport.size)]
        self._copies = CopyStream(device)
        self._exchanges = SideStream(device)

    def own(self, record: Record) -> Tensor:
        """What this rank holds of a record, uint8 [bytes]."""
        return self._part(self._memory.own, self.here, record)

    def fetch(self, record: Record, members: Sequence[int], slot: Tensor, after: Mark | None) -> Callable[[], None]:
        """Begins to bring the parts of `members`, one after the other, into a slot once `after` has passed.

        Returns:
            What makes compute that is enqueued later wait for them.
        """
        sizes = [self.shares.parts[record.block][member].size for member in members]
        targets = dict(zip(members, slot[: sum(sizes)].split(sizes), strict=True))
        if self._memory.members is not None:
            ready = after
            for member, target in targets.items():
                ready = self._copies.copy(target, self._part(self._memory.members[member], member, record), ready)
            return lambda: self._copies.wait(ready)
        own = self.own(record)
        if self.here in targets:
            targets.pop(self.here).copy_(own)
        with self._exchanges.beside():
            others = [member for member in range(self._transport.size) if member != self.here]
            sends = [Message(own, member) for member in others if len(own)]
            receives = [Message(target, member) for member, target in targets.items() if len(target)]
            return self._transport.exchange(sends, receives).arrived

    def close(self) -> None:
        """Frees the memory, once the copies and messages under way are done."""
        self._copies.synchronize()
        self._transport.finish()
        self._memory = PeerMemory(torch.empty(0, dtype=torch.uint8), None)

    def _part(self, memory: Tensor, member: int, record: Record) -> Tensor:
        begin = self._offsets[member][record]
        return memory[begin : begin + self.shares.parts[record.block][member].size]


class ShardSlots:
    """A feed of what `members` hold of the records, through fixed slots.

    Args:
        size: bytes of a slot.
        count: slots; with two, the next record comes while one is computed with.
    """

    def __init__(self, shard: Shard, members: Sequence[int], size: int, count: int, device: torch.device) -> None:
        self._shard, self._members = shard, members
        self._expected: deque[Record] = deque()
        # The memory may have been another tensor's until now.
        free = CopyStream(device).mark()
        slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        hold("slots", slots)
        self._free: deque[tuple[Tensor, Mark | None]] = deque((slot, free) for slot in slots)
        self._coming: deque[tuple[Tensor, Callable[[], None]]] = deque()
        self._out: deque[Tensor] = deque()

    def expect(self, records: Sequence[Record]) -> None:
        self._expected.extend(records)
        self._load()

    def take(self, wait: bool = True) -> Tensor | None:
        slot, arrived = self._coming.popleft()
        arrived()
        self._out.append(slot)
        return slot

    def give(self, done: Mark | None) -> None:
        self._free.append((self._out.popleft(), done))
        self._load()

    def close(self) -> None:
        for slots in (self._free, self._coming, self._out):
            slots.clear()

    def _load(self) -> None:
        """Begins to bring as many records as there are free slots; the same ones at the same point on every rank."""
        while self._expected and self._free:
            slot, free = self._free.popleft()
            record = self._expected.popleft()
            self._coming.append((slot, self._shard.fetch(record, self._members, slot, free)))


class ShardedBlocks(Blocks):
    """Blocks made of this rank's parameters, where they lie, and the others' in a slot.

    Args:
        foreign: block -> the layout of a slot that holds the others' parts.
    """

    def __init__(
        self,
        empty: nn.Module,
        shard: Shard,
        foreign: Mapping[int, RecordLayout],
        feed: ShardSlots,
        stream: CopyStream,
        device: torch.device,
        *,
        compiled: bool,
    ) -> None:
        super().__init__(empty, shard.shares.layout, feed, {}, stream, device, compiled=compiled)
        self._empty, self._device, self._compiled = empty, device, compiled
        self._shard, self._foreign = shard, foreign
        self._made: dict[tuple[Record, int], nn.Module] = {}  # by record and slot, so parameters never move

    def run(self, expert: Expert) -> Iterator[nn.Module]:
        for index in range(self._layout.blocks):
            record = Record(expert, index)
            slot = self._feed.take()
            assert slot is not None
            if self._widening is None:
                yield self._module(record, slot)
            else:
                self._widening.turn(self._tensors(record, slot))
            self._feed.give(self._stream.mark())
            if self._widening is not None:
                yield self._modules.at(self._widening.record)

    def close(self) -> None:
        super().close()
        self._made.clear()
        self._shard.close()

    def _module(self, record: Record, slot: Tensor) -> nn.Module:
        key = (record, slot.data_ptr())
        if key not in self._made:
            tensors = self._tensors(record, slot)
            self._made[key] = module_of(self._empty, tensors, self._device, compiled=self._compiled)
        return self._made[key]

    def _tensors(self, record: Record, slot: Tensor) -> dict[str, Tensor]:
        own = self._shard.shares.parts[record.block][self._shard.here].views(self._shard.own(record))
        return own | self._foreign[record.block].views(slot)


def build(setting: Setting) -> Teacher:
    """Each rank reads its part alone from the safetensors."""
    folder, world = setting.folder, setting.world
    device = world.device
    transport = Transport(world, node_members(world))
    if transport.size == 1:
        return on_one_rank(setting, "there is one rank on the node")
    layout = TeacherLayout.of(folder.experts, folder.transformer_config, Precision.of(setting.dtype, device))
    shares = Shares.of(layout, transport.size)
    memory = peer_memory(max(shares.size(member) for member in range(transport.size)), world, transport)
    shard = Shard(shares, memory, transport, device)
    held = {record: shares.parts[record.block][transport.index] for record in layout.records}
    reader = open_reader(folder, PartialLayout.within(layout, held), ranks=world.local_size)
    read_into(reader.read, {record: shard.own(record) for record in layout.records}, device)
    reader.close()
    world.barrier()  # from here on every rank's part may be read

    everyone = range(transport.size)
    others = [member for member in everyone if member != transport.index]
    whole = joined(shares.parts[OUTER])
    foreign = {b: joined(shares.parts[b][member] for member in others) for b in range(layout.blocks)}
    largest = max(part.size for part in foreign.values())
    empty = with_one_block(folder.transformer_config)
    empty_block = empty.get_submodule("blocks.0")
    empty.blocks = nn.ModuleList()
    stream = CopyStream(device)
    outer = ShardSlots(shard, everyone, whole.size, 1, device)
    blocks = ShardSlots(shard, others, largest, _SLOTS, device)
    engine = BlockEngine(
        OuterPart(empty, replace(layout, outer=whole), outer, stream, device),
        ShardedBlocks(empty_block, shard, foreign, blocks, stream, device, compiled=setting.config.teacher_compile),
        device,
        expand_timesteps=folder.expand_timesteps,
        micro_batch=setting.config.teacher_micro_batch,
    )
    return engine if memory.members is not None else LockstepTeacher(engine, transport, layout.blocks)
