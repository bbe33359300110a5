"""What all ranks of a pipeline know alike: the stages, the batches of a round, and the shape of every tensor sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wandistill.architecture import WanArchitecture
from wandistill.teacher.notice import Notice
from wandistill.teacher.transport import Message

Shape = tuple[int, ...]


class Batch(NamedTuple):
    """One forward on its way through the stages."""

    member: int  # that asked
    notice: Notice
    rows: range  # of the request's rows, both halves of guidance counted

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """F, H, W."""
        _, _, frames, height, width = self.notice.latents
        return frames, height, width

    @property
    def conditional(self) -> int:
        """How many of the rows, from the first on, are of the conditional half."""
        return max(min(self.rows.stop, self.notice.samples) - self.rows.start, 0)


class Station(NamedTuple):
    """A stage as all ranks know it."""

    member: int  # that computes it
    blocks: range


@dataclass(frozen=True)
class Route:
    """The way of a batch.

    Args:
        stations: the stages in order.
        dtype: of all that is sent but times.
        micro_batch: most rows of a batch; 0: all of a request.
    """

    stations: Sequence[Station]
    architecture: WanArchitecture
    expand_timesteps: bool
    dtype: torch.dtype
    micro_batch: int

    def batches(self, asked: Mapping[int, Notice]) -> list[Batch]:
        """The batches of a round in the order in which they enter.

        Those of members whose stages come first enter first: their answers are out when these members must pass the
        next round's batches on.
        """
        order = dict.fromkeys([*(station.member for station in self.stations), *asked])
        return [
            Batch(member, asked[member], rows)
            for member in order
            if member in asked
            for rows in asked[member].pieces(self.micro_batch)
        ]

    def inputs(self, notice: Notice) -> list[tuple[Shape, torch.dtype]]:
        """Shapes and dtypes of a request: x, t, positive prompt and, where guided, negative prompt.

        The model turns x and prompts to its dtype before anything else, so they may as well be sent in it.
        """
        samples = notice.samples
        sent = [
            (notice.latents, self.dtype),
            ((samples,), torch.float32),
            ((samples, *notice.prompt), self.dtype),
        ]
        return [*sent, ((1, *notice.prompt), self.dtype)] if notice.guided else sent

    def state(self, batch: Batch) -> list[Shape]:
        """Shapes between two stages: hidden state, prompt, time projection, time embedding."""
        rows, hidden = len(batch.rows), self.architecture.hidden_size
        tokens = self.architecture.tokens(batch.latent_shape)
        timed = (rows, tokens) if self.expand_timesteps else (rows,)
        return [(rows, tokens, hidden), (rows, batch.notice.prompt[0], hidden), (*timed, 6, hidden), (*timed, hidden)]

    def velocity(self, batch: Batch) -> Shape:
        """Shape of a batch's velocity."""
        return (len(batch.rows), self.architecture.out_channels, *batch.latent_shape)

    def feature(self, batch: Batch) -> Shape:
        """Shape of a block feature of a batch: of the conditional half alone."""
        return (batch.conditional, self.architecture.tokens(batch.latent_shape), self.architecture.hidden_size)


class Mail:
    """The messages of one exchange as one member sees them.

    Every member calls `move` for the same tensors in the same order, as far as it is an end of them.
    """

    def __init__(self, member: int, device: torch.device) -> None:
        self._member, self._device = member, device
        self.sends: list[Message] = []
        self.receives: list[Message] = []

    def move(self, tensor: Tensor | None, shape: Shape, dtype: torch.dtype, source: int, target: int) -> Tensor | None:
        """The tensor at `target`, where it will be after the exchange; None at other members.

        Args:
            tensor: what is moved; needed at `source` only.
            shape: its shape, which both ends know, as they know `dtype`.
        """
        if self._member == source:
            assert tensor is not None and tensor.shape == torch.Size(shape) and tensor.dtype == dtype
            if source == target:
                return tensor
            self.sends.append(Message(tensor.contiguous(), target))
        elif self._member == target:
            buffer = torch.empty(shape, dtype=dtype, device=self._device)
            self.receives.append(Message(buffer, source))
            return buffer
        return None
