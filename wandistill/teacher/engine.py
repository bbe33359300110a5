"""Computing a teacher whose blocks come one after the other: the engine of the placements cpu, offload, stream, disk.

The placements differ in where records come from (`wandistill.teacher.feeds`) and how many stay; the engine runs them
all. Every request that is waiting passes a block while it is there, so that what a block costs to bring is paid once
for all micro-batches of an optimizer step and both halves of guidance.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wandistill.models.forward import BlockState, embed, run_block, unembed
from wandistill.teacher.base import Expert, Prompt, Request, TeacherOutput
from wandistill.teacher.compiled import compile_block
from wandistill.teacher.copy_stream import CopyStream
from wandistill.teacher.feeds import Feed
from wandistill.teacher.host_copy import HostCopy
from wandistill.teacher.layout import OUTER, Record, RecordLayout, TeacherLayout
from wandistill.teacher.widening import Widening


def module_of(empty: nn.Module, tensors: Mapping[str, Tensor], device: torch.device, *, compiled: bool) -> nn.Module:
    """A frozen module like `empty` whose parameters are `tensors`, which lie on `device`."""
    module = copy.deepcopy(empty)
    module.load_state_dict(tensors, assign=True)
    # For the buffers, which are no part of a record.
    module.requires_grad_(False).eval().to(device)
    if compiled:
        compile_block(module)
    return module


class Modules:
    """Modules whose parameters are views of records.

    On a GPU there is one for each address, so that compiled code finds its parameters where they were. On a CPU, where
    a record lies anywhere in the host copy, one module goes from record to record.

    Args:
        compiled: whether they run compiled.
    """

    def __init__(self, empty: nn.Module, layout: RecordLayout, device: torch.device, *, compiled: bool = False) -> None:
        self._empty = empty
        self._layout = layout
        self._device = device
        self._compiled = compiled
        self._made: dict[int, nn.Module] = {}

    def at(self, record: Tensor) -> nn.Module:
        """The module of the record at this address; on a CPU the one before is no longer valid."""
        address = record.data_ptr()
        if address not in self._made:
            views = self._layout.views(record)
            if self._device.type == "cpu" and self._made:
                _, module = self._made.popitem()
                for name, parameter in module.named_parameters():
                    parameter.data = views[name]
            else:
                module = module_of(self._empty, views, self._device, compiled=self._compiled)
            self._made[address] = module
        return self._made[address]

    def close(self) -> None:
        """Drops the modules."""
        self._made.clear()


class Blocks:
    """The blocks of a teacher, in order, as modules on the compute device.

    Args:
        empty: a block without weights.
        feed: where the blocks come from that are not in `resident`.
        resident: the records that stay on the device.
        stream: of the feed's copies.
        compiled: whether they run compiled.
    """

    def __init__(
        self,
        empty: nn.Module,
        layout: TeacherLayout,
        feed: Feed,
        resident: Mapping[Record, Tensor],
        stream: CopyStream,
        device: torch.device,
        *,
        compiled: bool,
    ) -> None:
        self._layout = layout
        self._feed = feed
        self._resident = resident
        self._stream = stream
        self._modules = Modules(empty, layout.wide or layout.block, device, compiled=compiled)
        self._widening = None if layout.wide is None else Widening(layout, device)
        self._stored: dict[int, dict[str, Tensor]] = {}  # by address: the tensors of records that are widened

    def expect(self, expert: Expert) -> None:
        """Says that `run` of this expert comes after those that were expected before."""
        records = [Record(expert, block) for block in range(self._layout.blocks)]
        self._feed.expect([record for record in records if record not in self._resident])

    def run(self, expert: Expert) -> Iterator[nn.Module]:
        """The blocks of an expected expert; each is valid until the next is taken."""
        for index in range(self._layout.blocks):
            resident = self._resident.get(Record(expert, index))
            record = self._feed.take() if resident is None else resident
            assert record is not None
            if self._widening is None:
                yield self._modules.at(record)
            else:
                self._widening.turn(self._tensors_at(record))
            if resident is None:
                self._feed.give(self._stream.mark())
            if self._widening is not None:
                yield self._modules.at(self._widening.record)

    def close(self) -> None:
        """Frees the blocks."""
        self._feed.close()
        self._modules.close()
        self._resident = {}
        self._stored.clear()
        self._widening = None

    def _tensors_at(self, record: Tensor) -> dict[str, Tensor]:
        """The tensors of a stored block."""
        address = record.data_ptr()
        if address not in self._stored:
            self._stored[address] = self._layout.block.views(record)
        return self._stored[address]


class OuterPart:
    """What lies outside the blocks of the expert in use, as a module on the compute device."""

    def __init__(
        self, empty: nn.Module, layout: TeacherLayout, feed: Feed, stream: CopyStream, device: torch.device
    ) -> None:
        self._feed = feed
        self._stream = stream
        self._modules = Modules(empty, layout.outer, device)
        self._expert: Expert | None = None
        self._module: nn.Module | None = None

    def turn_to(self, expert: Expert) -> None:
        """Lets the part of `expert` come; the one before is no longer valid."""
        if expert is self._expert:
            return
        if self._expert is not None:
            self._feed.give(self._stream.mark())
        self._feed.expect([Record(expert, OUTER)])
        self._expert, self._module = expert, None

    def module(self) -> nn.Module:
        """The module of the expert that was turned to last."""
        if self._module is None:
            record = self._feed.take()
            assert record is not None
            self._module = self._modules.at(record)
        return self._module

    def close(self) -> None:
        """Frees the part."""
        self._feed.close()
        self._modules.close()
        self._module = None


@dataclass(eq=False)
class Ticket:
    """A request, and its answer once it is computed."""

    request: Request
    output: TeacherOutput | None = None


@dataclass
class _Pass:
    """One run through an expert's blocks."""

    expert: Expert
    tickets: list[Ticket] = field(default_factory=list)


class BlockEngine:
    """A teacher computed block by block.

    A request starts the transfer of its expert's first blocks, as far as slots are free: asked for before the
    student's backward, they come beside it. Requests of one expert that wait together run together; experts run in the
    order in which they were first asked for.

    Args:
        device: where the teacher computes; x may come from another, and answers go back to it.
        micro_batch: most samples in one forward, both halves of guidance counted; 0: all of a request.
        closing: what gives back the memory, threads and files that the records come from.
        copy: of the whole teacher in the node's memory, if there is one.
    """

    def __init__(
        self,
        outer: OuterPart,
        blocks: Blocks,
        device: torch.device,
        *,
        expand_timesteps: bool,
        micro_batch: int,
        closing: Sequence[Callable[[], None]] = (),
        copy: HostCopy | None = None,
    ) -> None:
        self._outer = outer
        self._blocks = blocks
        self._device = device
        self._expand_timesteps = expand_timesteps
        self._micro_batch = micro_batch
        self._closing = closing
        self._copy = copy
        self._waiting: deque[_Pass] = deque()

    def request(
        self, x: Tensor, t: Tensor, prompt: Prompt, expert: Expert, guidance: float, features: Sequence[int] = ()
    ) -> Ticket:
        """Queues a request."""
        ticket = Ticket(Request(x, t, prompt, expert, guidance, tuple(features)))
        for waiting in self._waiting:
            if waiting.expert is expert:
                waiting.tickets.append(ticket)
                return ticket
        self._waiting.append(_Pass(expert, [ticket]))
        self._turn()
        self._blocks.expect(expert)
        return ticket

    @torch.no_grad()
    def result(self, ticket: object) -> TeacherOutput:
        """The answer; computes what waits, up to this ticket."""
        assert isinstance(ticket, Ticket)
        while ticket.output is None:
            assert self._waiting, "a ticket is answered once"
            self._run(self._waiting[0])
            self._waiting.popleft()
            self._turn()
        output, ticket.output = ticket.output, None
        return output

    def weight(self, expert: Expert, name: str) -> Tensor | None:
        """From the host copy."""
        return self._copy.weight(expert, name) if self._copy is not None else None

    def close(self) -> None:
        """Frees everything; waiting requests are dropped."""
        self._waiting.clear()
        self._outer.close()
        self._blocks.close()
        for close in self._closing:
            close()

    def _turn(self) -> None:
        """Lets the outer part of the pass that is next come."""
        if self._waiting:
            self._outer.turn_to(self._waiting[0].expert)

    def _run(self, current: _Pass) -> None:
        outer = self._outer.module()
        states = [self._embed(outer, ticket.request) for ticket in current.tickets]
        kept: list[list[dict[int, Tensor]]] = [[{} for _ in pieces] for pieces in states]
        for index, block in enumerate(self._blocks.run(current.expert)):
            for ticket, pieces, features in zip(current.tickets, states, kept, strict=True):
                for number, state in enumerate(pieces):
                    pieces[number] = run_block(block, state)
                    if index in ticket.request.features:
                        features[number][index] = pieces[number].hidden
        for ticket, pieces, features in zip(current.tickets, states, kept, strict=True):
            velocity = torch.cat([unembed(outer, state) for state in pieces])
            joined = {index: torch.cat([piece[index] for piece in features]) for index in ticket.request.features}
            ticket.output = ticket.request.output(velocity, joined)

    def _embed(self, outer: nn.Module, request: Request) -> list[BlockState]:
        """The states that enter the first block, one for each forward of the request."""
        # From a GPU to the CPU a copy must have arrived before it is read; the other way the stream keeps the order.
        beside = self._device.type == "cuda"
        inputs = [tensor.to(self._device, non_blocking=beside) for tensor in request.model_inputs()]
        step = self._micro_batch or len(inputs[0])
        pieces = zip(*(tensor.split(step) for tensor in inputs), strict=True)
        return [embed(outer, x, t, prompt, expand_timesteps=self._expand_timesteps) for x, t, prompt in pieces]
