"""A teacher in stages on several ranks, whose batches pass one after the other: gpu0, balanced, sequential, custom.

A request begins a round, in which every rank's request goes through all stages, cut into batches as every placement
cuts it. Time in a round is counted in ticks: at each tick a stage computes one batch and passes it on, so batch b is in
stage s at tick b + s. Every rank goes through the ticks in order and exchanges its messages of a tick together, so
sends and receives match and cannot wait for each other in a circle. Nobody waits for the end of a tick: a stage waits
for its next batch alone, and the next round's batches enter while this round's leave. gpu0 is the pipeline with one
stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wandistill.errors import WandistillError
from wandistill.models.forward import BlockState
from wandistill.teacher.base import Expert, Prompt, Request, TeacherOutput
from wandistill.teacher.notice import Kind, Notice, check_agreement
from wandistill.teacher.route import Batch, Mail, Route
from wandistill.teacher.side_stream import SideStream
from wandistill.teacher.stage import Stage, StageOutput
from wandistill.teacher.transport import Notices, Transfer, Transport


@dataclass(eq=False)
class Ticket:
    """A request, and its answer as it arrives."""

    request: Request
    notices: Notices
    velocity: list[Tensor] = field(default_factory=list)
    features: dict[int, list[Tensor]] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    mark: torch.cuda.Event | None = None  # after what this rank computed of the answer itself


class Inputs:
    """A request at the first stage; None elsewhere.

    Args:
        transfer: that it comes with.
    """

    def __init__(self, request: Request | None, transfer: Transfer) -> None:
        self._request, self._transfer = request, transfer
        self._tensors: tuple[Tensor, ...] | None = None

    def arrived(self) -> tuple[Tensor, ...]:
        """The model's inputs, all rows of the request, once they are there."""
        if self._tensors is None:
            assert self._request is not None
            self._transfer.arrived()
            self._tensors = self._request.model_inputs()
        return self._tensors


class PipelineTeacher:
    """A teacher whose stages are on several ranks; each rank gives its requests and gets its answers.

    All members make their requests in the same order, as many of them; a rank that only computes calls `serve`.

    Args:
        stages: those that this rank computes, by their number.
        served: whether a member only serves; `close` then tells it to end.
    """

    def __init__(
        self,
        route: Route,
        stages: Mapping[int, Stage],
        transport: Transport,
        device: torch.device,
        *,
        served: bool = False,
    ) -> None:
        self._route, self._stages, self._transport = route, stages, transport
        self._device, self._served = device, served
        self._here = transport.index
        self._side = SideStream(device)
        self._closed = False

    @torch.no_grad()
    def request(
        self, x: Tensor, t: Tensor, prompt: Prompt, expert: Expert, guidance: float, features: Sequence[int] = ()
    ) -> Ticket:
        """Sends the request, and does this rank's part of the round, or on a GPU enqueues it."""
        request = Request(x, t, prompt, expert, guidance, tuple(features))
        notice = Notice.of(request)
        ticket = Ticket(request, self._announce(notice))
        asked = self._agreed(ticket.notices) if self._stages else {self._here: notice}
        with self._side.beside((x, t, *(tensor for tensor in prompt if tensor is not None))):
            self._round(asked, ticket)
        return ticket

    def result(self, ticket: object) -> TeacherOutput:
        """Waits for the answer."""
        assert isinstance(ticket, Ticket) and ticket.velocity, "a ticket is answered once"
        self._agreed(ticket.notices)
        for transfer in ticket.transfers:
            transfer.arrived()
        kept = ticket.features
        self._side.hand_over([*ticket.velocity, *(piece for pieces in kept.values() for piece in pieces)], ticket.mark)
        output = ticket.request.output(
            torch.cat(ticket.velocity), {index: torch.cat(kept[index]) for index in ticket.request.features}
        )
        ticket.velocity, ticket.features, ticket.transfers = [], {}, []
        return output

    def weight(self, expert: Expert, name: str) -> Tensor | None:
        """None: no rank holds the whole teacher in host memory."""
        return None

    @torch.no_grad()
    def serve(self) -> None:
        """Computes what the others ask, until they close their teachers."""
        self._served = False  # by this rank: it has nobody to tell
        while True:
            asked = self._agreed(self._announce(Notice(Kind.SERVE)))
            if any(notice.kind is Kind.STOP for notice in asked.values()):
                return
            with self._side.beside():
                self._round(asked, None)

    def close(self) -> None:
        """Frees the weights; the process group lives on with the process."""
        if self._closed:
            return
        self._closed = True
        if self._served:
            self._announce(Notice(Kind.STOP)).wait()
        self._transport.finish()
        for stage in self._stages.values():
            stage.close()

    def _announce(self, notice: Notice) -> Notices:
        return self._transport.announce(notice.encode(self._route.architecture.num_layers))

    def _agreed(self, notices: Notices) -> dict[int, Notice]:
        """What each member wants in a round, but for those that serve."""
        decoded = [Notice.decode(numbers) for numbers in notices.wait()]
        try:
            check_agreement(decoded, self._transport.members)
        except WandistillError:
            self._transport.abandon()
            raise
        return {member: notice for member, notice in enumerate(decoded) if notice.kind is not Kind.SERVE}

    def _round(self, asked: Mapping[int, Notice], ticket: Ticket | None) -> None:
        """Takes every batch of the round through the stages that are here.

        Args:
            asked: the requests of all members, or at a member without a stage its own: it takes part in nothing else.
            ticket: this rank's, if it asks.
        """
        batches, stages = self._route.batches(asked), len(self._route.stations)
        for stage in self._stages.values():
            stage.expect(batches[0].notice.expert, len(batches))
        mail = Mail(self._here, self._device)
        request = self._hand_in(mail, batches[0], ticket)
        inputs = Inputs(request, self._transport.exchange(mail.sends, mail.receives))
        entering: dict[int, tuple[BlockState, Transfer]] = {}  # stage -> what it computes at the next tick
        for tick in range(len(batches) + stages - 1):
            mail = Mail(self._here, self._device)
            passed: dict[int, BlockState] = {}
            answers = 0
            for number in range(max(0, tick - len(batches) + 1), min(tick + 1, stages)):
                batch = batches[tick - number]
                output = StageOutput()
                if number in self._stages:
                    output = self._compute(number, batch, inputs, entering.pop(number, None))
                if number + 1 < stages:
                    state = self._pass_on(mail, batch, number, output.state)
                    if state is not None:
                        passed[number + 1] = state
                answers += self._answer(mail, batch, number, output, ticket)
            # A member's request comes a tick before it enters: until then the member's stage may still be computing
            # the round before, after which alone it sends.
            following = tick + 1 < len(batches) and batches[tick + 1].member != batches[tick].member
            request = self._hand_in(mail, batches[tick + 1], ticket) if following else None
            transfer = self._transport.exchange(mail.sends, mail.receives)
            entering = {number: (state, transfer) for number, state in passed.items()}
            if following:
                inputs = Inputs(request, transfer)
            if answers and ticket is not None:
                ticket.transfers.append(transfer)

    def _hand_in(self, mail: Mail, batch: Batch, ticket: Ticket | None) -> Request | None:
        """Moves the whole request that `batch` is of to the first stage; returns it there."""
        first, own = self._route.stations[0].member, ticket.request if ticket else None
        tensors: Sequence[Tensor | None] = [None] * 4
        if own is not None and batch.member == self._here:
            tensors = [own.x, own.t, own.prompt.positive, own.prompt.negative]
        moved = []
        for tensor, (shape, dtype) in zip(tensors, self._route.inputs(batch.notice), strict=False):
            placed = None if tensor is None else tensor.to(self._device, dtype)
            moved.append(mail.move(placed, shape, dtype, batch.member, first))
        if self._here != first:
            return None
        x, t, positive, *negative = moved
        assert x is not None and t is not None and positive is not None
        # Whatever guidance is asked for, it does not shape the inputs; the rank that asked applies it.
        guidance = 0.0 if negative else 1.0
        return Request(x, t, Prompt(positive, negative[0] if negative else None), batch.notice.expert, guidance, ())

    def _compute(
        self,
        number: int,
        batch: Batch,
        inputs: Inputs,
        entering: tuple[BlockState, Transfer] | None,
    ) -> StageOutput:
        """What a stage here makes of a batch."""
        stage, notice = self._stages[number], batch.notice
        if entering is None:
            x, t, prompt = (tensor[batch.rows.start : batch.rows.stop] for tensor in inputs.arrived())
            return stage.run(notice.expert, (x, t, prompt), notice.features)
        state, transfer = entering
        transfer.arrived()
        return stage.run(notice.expert, state, notice.features)

    def _pass_on(self, mail: Mail, batch: Batch, number: int, state: BlockState | None) -> BlockState | None:
        """Moves a batch from a stage to the next one; returns it there."""
        source, target = (self._route.stations[n].member for n in (number, number + 1))
        tensors: Sequence[Tensor | None] = [None] * 4
        if state is not None:
            tensors = [state.hidden, state.prompt, state.time_projection, state.time_embedding]
        shapes, dtype = self._route.state(batch), self._route.dtype
        moved = [mail.move(tensor, shape, dtype, source, target) for tensor, shape in zip(tensors, shapes, strict=True)]
        hidden, prompt, time_projection, time_embedding = moved
        if hidden is None or prompt is None or time_projection is None or time_embedding is None:
            return None
        rotary = self._stages[number + 1].rotary(batch.latent_shape)
        return BlockState(hidden, prompt, time_projection, rotary, time_embedding, batch.latent_shape)

    def _answer(self, mail: Mail, batch: Batch, number: int, output: StageOutput, ticket: Ticket | None) -> int:
        """Moves what a stage has of the answer to the member that asked; returns how many tensors will arrive here."""
        route, before = self._route, len(mail.receives)
        station, target = route.stations[number], batch.member
        if number == len(route.stations) - 1:
            velocity = mail.move(output.velocity, route.velocity(batch), route.dtype, station.member, target)
            if velocity is not None and ticket is not None:
                ticket.velocity.append(velocity)
        wanted = [index for index in batch.notice.features if index in station.blocks and batch.conditional]
        for index in wanted:
            hidden = output.features[index][: batch.conditional] if index in output.features else None
            moved = mail.move(hidden, route.feature(batch), route.dtype, station.member, target)
            if moved is not None and ticket is not None:
                ticket.features.setdefault(index, []).append(moved)
        if ticket is not None and station.member == target == self._here:
            ticket.mark = self._side.mark()
        return len(mail.receives) - before
