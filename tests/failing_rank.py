"""What a rank does before its run so that it fails in the middle of it; named at the top level, since ranks are forked
from another process."""

from __future__ import annotations

from typing import Any


def runs_out(rank: int) -> None:
    """Rank 1 finds no host memory for the teacher's answer of its third step, as torch reports it."""
    from wandistill.train.loop import Loop

    answer = Loop._target
    calls = []

    def failing(self: Loop, *arguments: Any) -> Any:
        calls.append(1)
        if rank == 1 and len(calls) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99999999 bytes.")
        return answer(self, *arguments)

    Loop._target = failing  # type: ignore[method-assign]
