"""A stage of the pipeline: consecutive units of the teacher (see `wandistill.device_map`) on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wandistill.device_map import EMBEDDING_MODULES, HEAD_MODULES, Run
from wandistill.models.forward import BlockState, embed, run_block, unembed
from wandistill.models.weights import with_one_block
from wandistill.teacher.base import Expert
from wandistill.teacher.copy_stream import CopyStream
from wandistill.teacher.engine import Blocks, OuterPart
from wandistill.teacher.feeds import Feed, ReadAhead, Slots
from wandistill.teacher.host_memory import HostBuffers
from wandistill.teacher.layout import OUTER, Precision, Record, TeacherLayout
from wandistill.teacher.parts import Held, PartialLayout, layout_of_fields, load, open_reader, shifted

if TYPE_CHECKING:
    from wandistill.models.wan import WanFolder
    from wandistill.teacher import Setting

# Slots on a GPU for blocks that come from host memory or disk: one is computed with, one is filled.
_SLOTS = 2
# Blocks that are read ahead from disk.
_DISK_BUFFERS = 4


@dataclass
class StageOutput:
    """What leaves a stage."""

    state: BlockState | None = None  # for the next stage
    velocity: Tensor | None = None  # [B, C, F, H, W], of the last stage
    features: dict[int, Tensor] = field(default_factory=dict)  # block -> hidden state [B, N, D]


class Stage:
    """Computes its units for one batch after the other.

    Args:
        embedding: what comes before the first block, if it is here.
        segments: the blocks, in order: the index of the first, and the blocks from there on.
        head: what comes after the last block, if it is here.
        rope: the rotary tables.
        closing: what gives back memory, threads and files.
    """

    def __init__(
        self,
        embedding: OuterPart | None,
        segments: Sequence[tuple[int, Blocks]],
        head: OuterPart | None,
        rope: nn.Module,
        *,
        expand_timesteps: bool,
        closing: Sequence[Callable[[], None]],
    ) -> None:
        self._embedding, self._segments, self._head = embedding, segments, head
        self._rope = rope
        self._expand_timesteps = expand_timesteps
        self._closing = closing

    def expect(self, expert: Expert, times: int) -> None:
        """Says that `run` comes `times` times for this expert, so that blocks elsewhere are brought ahead."""
        for outer in (self._embedding, self._head):
            if outer is not None:
                outer.turn_to(expert)
        for _ in range(times):
            for _, blocks in self._segments:
                blocks.expect(expert)

    def rotary(self, latent_shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """The rotary tables of latents of this shape (F, H, W), as `embed` makes them."""
        return self._rope(torch.empty(1, 1, *latent_shape, device="meta"))

    def run(
        self, expert: Expert, entering: BlockState | tuple[Tensor, Tensor, Tensor], features: Iterable[int]
    ) -> StageOutput:
        """Computes one batch: a state, or for the first stage x, t and prompt."""
        output = StageOutput()
        if isinstance(entering, BlockState):
            state = entering
        else:
            assert self._embedding is not None
            state = embed(self._embedding.module(), *entering, expand_timesteps=self._expand_timesteps)
        for first, blocks in self._segments:
            for index, block in enumerate(blocks.run(expert), first):
                state = run_block(block, state)
                if index in features:
                    output.features[index] = state.hidden
        if self._head is None:
            output.state = state
        else:
            output.velocity = unembed(self._head.module(), state)
        return output

    def close(self) -> None:
        """Frees the weights."""
        for outer in (self._embedding, self._head):
            if outer is not None:
                outer.close()
        for _, blocks in self._segments:
            blocks.close()
        for close in self._closing:
            close()


def load_stage(setting: Setting, runs: Sequence[Run]) -> Stage:
    """Loads consecutive runs of units, and nothing else of the teacher."""
    return _Loading(setting).stage(runs)


class _Loading:
    """What the parts of a stage are made from."""

    def __init__(self, setting: Setting) -> None:
        self._folder: WanFolder = setting.folder
        self._device = setting.world.device
        self._ranks = setting.world.local_size
        self._compiled = setting.config.teacher_compile
        self._stream = CopyStream(self._device)
        config = self._folder.transformer_config
        self._layout = TeacherLayout.of(self._folder.experts, config, Precision.of(setting.dtype, self._device))
        self._outside = with_one_block(config)
        self._block = self._outside.get_submodule("blocks.0")
        self._outside.blocks = nn.ModuleList()
        self._closing: list[Callable[[], None]] = []

    def stage(self, runs: Sequence[Run]) -> Stage:
        embedding, head, segments = None, None, []
        last = self._layout.blocks + 1
        for units, place in runs:
            if 0 in units:
                embedding = self._outer(EMBEDDING_MODULES, HEAD_MODULES, place.store)
            first, stop = max(units.start, 1), min(units.stop, last)
            if first < stop:
                # Unit 0 is the embedding, so blocks count one less.
                segments.append((first - 1, self._blocks(range(first - 1, stop - 1), place.store)))
            if last in units:
                head = self._outer(HEAD_MODULES, EMBEDDING_MODULES, place.store)
        return Stage(
            embedding,
            segments,
            head,
            self._outside.get_submodule("rope").to(self._device),
            expand_timesteps=self._folder.expand_timesteps,
            closing=self._closing,
        )

    def _outer(self, modules: Sequence[str], others: Sequence[str], store: str) -> OuterPart:
        """Modules outside the blocks, without the `others`."""
        empty = copy.deepcopy(self._outside)
        for name in others:
            delattr(empty, name)
        fields = self._layout.outer.fields.values()
        part = layout_of_fields(f for f in fields if f.name.split(".")[0] in modules)
        records = self._layout.outer_records
        held = PartialLayout.within(self._layout, {record: part for record in records})
        feed = self._feed(held, records, store)
        own = replace(self._layout, outer=part)
        return OuterPart(empty, own, feed, self._stream, self._device)

    def _blocks(self, indices: range, store: str) -> Blocks:
        """Blocks of all experts, counted from the first of `indices`."""
        own = replace(self._layout, blocks=len(indices))
        records = [Record(expert, number) for expert in self._layout.experts for number in range(len(indices))]
        feed = self._feed(self._layout, records, store, first=indices.start)
        return Blocks(self._block, own, feed, {}, self._stream, self._device, compiled=self._compiled)

    def _feed(self, layout: TeacherLayout, records: Sequence[Record], store: str, first: int = 0) -> Feed:
        """Where `records` come from; their blocks are counted from `first`."""
        reader = open_reader(self._folder, layout, ranks=self._ranks, direct=store == "disk")
        outer = records[0].block == OUTER
        read = reader.read if outer else shifted(reader.read, first)
        size = layout.layout_of(records[0]).size
        if store == "device":
            held = load(read, dict.fromkeys(records, size), self._device)
            reader.close()
            return Held(held)
        count = (1 if outer else _DISK_BUFFERS) if store == "disk" else len(records)
        buffers = HostBuffers(size, count, self._device)
        self._closing += [reader.close, buffers.close]
        if store == "disk":
            source: Feed = ReadAhead(read, buffers.tensors)
        else:
            for record, buffer in zip(records, buffers.tensors, strict=True):
                read(record, buffer)
            source = Held(dict(zip(records, buffers.tensors, strict=True)))
        if self._device.type == "cpu":
            return source
        return Slots(source, size, 1 if outer else _SLOTS, self._device, self._stream)
