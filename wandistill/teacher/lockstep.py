"""A teacher whose ranks go in step: they send each other its parts, so all must ask the same, in the same order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from wandistill.teacher.base import Expert, Prompt, Request, Teacher, TeacherOutput
from wandistill.teacher.notice import Notice, check_agreement
from wandistill.teacher.transport import Transport


class LockstepTeacher:
    """A teacher whose ranks send each other its parts in step: they must ask the same expert, so this is checked."""

    def __init__(self, teacher: Teacher, transport: Transport, blocks: int) -> None:
        self._teacher, self._transport, self._blocks = teacher, transport, blocks

    def request(
        self, x: Tensor, t: Tensor, prompt: Prompt, expert: Expert, guidance: float, features: Sequence[int] = ()
    ) -> object:
        """Waits for the other ranks' requests, then makes this one."""
        notice = Notice.of(Request(x, t, prompt, expert, guidance, tuple(features)))
        notices = self._transport.announce(notice.encode(self._blocks)).wait()
        check_agreement([Notice.decode(numbers) for numbers in notices], self._transport.members)
        return self._teacher.request(x, t, prompt, expert, guidance, features)

    def result(self, ticket: object) -> TeacherOutput:
        """The answer."""
        return self._teacher.result(ticket)

    def weight(self, expert: Expert, name: str) -> Tensor | None:
        """From the node's memory, where each rank finds it alone."""
        return self._teacher.weight(expert, name)

    def close(self) -> None:
        """Frees the weights."""
        self._teacher.close()
