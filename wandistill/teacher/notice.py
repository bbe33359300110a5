"""What a rank tells the others of a placement with each request: enough to know every shape that will be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from wandistill.errors import WandistillError
from wandistill.teacher.base import Expert, Request

_EXPERTS = tuple(Expert)
_WORD = 62  # features in one number of a notice


class Kind(IntEnum):
    """What a rank wants in a round."""

    ASK = 0
    SERVE = 1  # nothing: it computes for others
    STOP = 2  # it asks nothing more


@dataclass(frozen=True)
class Notice:
    """One rank's part of a round."""

    kind: Kind
    expert: Expert = Expert.HIGH
    guided: bool = False
    latents: tuple[int, ...] = (0, 0, 0, 0, 0)  # B, C, F, H, W
    prompt: tuple[int, ...] = (0, 0)  # L tokens, E
    features: tuple[int, ...] = ()  # ascending

    @classmethod
    def of(cls, request: Request) -> Notice:
        """The notice of a request."""
        return cls(
            Kind.ASK,
            request.expert,
            request.guided,
            tuple(request.x.shape),
            tuple(request.prompt.positive.shape[1:]),
            tuple(sorted(set(request.features))),
        )

    @property
    def samples(self) -> int:
        """Samples asked for."""
        return self.latents[0]

    def pieces(self, micro_batch: int) -> list[range]:
        """Rows of each forward: both halves of guidance make one batch, cut as every placement cuts it."""
        rows = self.samples * (2 if self.guided else 1)
        step = micro_batch or rows
        return [range(start, min(start + step, rows)) for start in range(0, rows, step)]

    def encode(self, blocks: int) -> list[int]:
        """As numbers; as many for every notice about a teacher of `blocks` blocks."""
        words = [0] * (blocks // _WORD + 1)
        for feature in self.features:
            words[feature // _WORD] |= 1 << feature % _WORD
        return [self.kind, _EXPERTS.index(self.expert), self.guided, *self.latents, *self.prompt, *words]

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> Notice:
        """The notice that `encode` turned into `numbers`."""
        kind, expert, guided, *sizes = numbers
        features = tuple(
            word * _WORD + bit for word, bits in enumerate(sizes[7:]) for bit in range(_WORD) if bits >> bit & 1
        )
        return cls(Kind(kind), _EXPERTS[expert], bool(guided), tuple(sizes[:5]), tuple(sizes[5:7]), features)


def check_agreement(notices: Sequence[Notice], members: Sequence[int]) -> None:
    """Holds that all ranks that ask anything ask it of one expert, and that they stop together.

    Raises:
        WandistillError: they do not; going on would hang, or mix the weights of two experts.
    """
    asking = [(rank, notice) for rank, notice in zip(members, notices, strict=True) if notice.kind is not Kind.SERVE]
    said = {rank: notice.expert.value if notice.kind is Kind.ASK else "nothing more" for rank, notice in asking}
    if len(set(said.values())) > 1:
        told = ", ".join(f"rank {rank} {what}" for rank, what in said.items())
        raise WandistillError(
            f"The ranks disagree about what the teacher is asked: {told}. The expert is drawn once per step for all "
            "ranks; give all ranks the same --seed and settings."
        )
