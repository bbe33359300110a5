"""What a placement of the frozen teacher is to the rest of a run.

A placement answers requests: `request(...)` gives a ticket at once, `result(ticket)` the target. Between the two a
placement may compute, copy or send as it likes, so callers make all requests of an optimizer step before they ask
for the first result: a placement that brings blocks to the device one by one runs every request through a block
before the block leaves.

Every placement gives the same numbers, because `Request` makes the batch (both halves of classifier-free guidance
together) and the answer for all of them, and `wandistill.models.forward` computes the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Expert(str, Enum):
    """A teacher's experts by the name of their component in a WanPipeline folder."""

    HIGH = "transformer"  # noise levels t >= boundary; the only one of a teacher with one expert
    LOW = "transformer_2"  # noise levels t < boundary


class Prompt(NamedTuple):
    """Prompt embeddings of a batch; zero after each prompt's end, as Wan was trained."""

    positive: Tensor  # [B, L, E]
    negative: Tensor | None  # [1, L, E] for the whole batch, or None: no guidance


class TeacherOutput(NamedTuple):
    """A teacher's answer, float32 on the student's device."""

    velocity: Tensor  # [B, C, F, H, W], guided where guidance was asked for
    features: dict[int, Tensor]  # block index -> hidden state [B, N, D] of the conditional half


@dataclass(frozen=True, eq=False)
class Request:
    """One forward of the teacher as a placement gets it."""

    x: Tensor  # noisy latents [B, C, F, H, W]
    t: Tensor  # times in 0..1 [B]
    prompt: Prompt
    expert: Expert
    guidance: float  # 1.0: the conditional velocity alone
    features: tuple[int, ...]

    @property
    def guided(self) -> bool:
        """Whether the unconditional half is needed."""
        return self.guidance != 1.0 and self.prompt.negative is not None

    def model_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, t and prompt as the model gets them: with guidance, the conditional half, then the unconditional."""
        if not self.guided:
            return self.x, self.t, self.prompt.positive
        assert self.prompt.negative is not None
        negative = self.prompt.negative.expand(len(self.x), -1, -1)
        return (
            torch.cat([self.x, self.x]),
            torch.cat([self.t, self.t]),
            torch.cat([self.prompt.positive, negative]),
        )

    def output(self, velocity: Tensor, features: dict[int, Tensor]) -> TeacherOutput:
        """The answer from the model's raw velocity [B or 2B, ...] and features; guidance is applied in float32."""
        count = len(self.x)
        device = self.x.device
        kept = {index: hidden[:count].float().to(device) for index, hidden in features.items()}
        velocity = velocity.float()
        if self.guided:
            conditional, unconditional = velocity[:count], velocity[count:]
            velocity = unconditional + self.guidance * (conditional - unconditional)
        return TeacherOutput(velocity.to(device), kept)


class Teacher(Protocol):
    """A placed teacher."""

    def request(
        self,
        x: Tensor,
        t: Tensor,
        prompt: Prompt,
        expert: Expert,
        guidance: float,
        features: Sequence[int] = (),
    ) -> Any:
        """Asks for the teacher's velocity of `x` at `t`; returns a ticket for `result`."""
        ...

    def result(self, ticket: Any) -> TeacherOutput:
        """The answer to one ticket; each ticket is answered once."""
        ...

    def weight(self, expert: Expert, name: str) -> Tensor | None:
        """The tensor `name` of the expert's files where this node's memory holds the same numbers, if only in another
        dtype. None: it holds none, or rounded ones. Valid until `close`, so whoever keeps it copies it.
        """
        ...

    def close(self) -> None:
        """Gives memory, files and process groups back."""
        ...
