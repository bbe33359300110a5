"""The teacher of a run, at its place from when it is first asked until it is released."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from wandistill import teacher as placement
from wandistill.data.embeddings import free_memory
from wandistill.errors import WandistillError
from wandistill.teacher.base import Teacher
from wandistill.train.rank_snapshot import RankReporter
from wandistill.train.serving import Lead


class PlacedTeacher:
    """The teacher, loaded when it is first asked for: a run whose caches are full may need none.

    Args:
        reporter: is told while the teacher loads.
        lead: tells the rank that only computes the teacher, if there is one; on one of the others.
    """

    def __init__(
        self, setting: placement.Setting, reporter: RankReporter | None = None, lead: Lead | None = None
    ) -> None:
        self._setting, self.lead = setting, lead
        self._during: Callable[[str], AbstractContextManager[Any]] = reporter.during if reporter else nullcontext
        self._teacher: Teacher | None = None

    def get(self) -> Teacher:
        """The teacher at its place; all ranks that ask it call this together."""
        if self._teacher is None:
            if self.lead is not None:
                self.lead.place()
            with self._during("load"):
                self._teacher = placement.place(self._setting)
        return self._teacher

    @property
    def placed(self) -> Teacher | None:
        """The teacher if it is at its place now; it is not loaded for this."""
        return self._teacher

    def release(self) -> None:
        """Gives its memory back; `get` loads it again."""
        if self._teacher is not None:
            self._teacher.close()
            self._teacher = None
            free_memory(self._setting.world.device)

    def end(self, error: WandistillError | None = None) -> None:
        """Lets the rank end that only computes the teacher, if there is one: with `error` if that ended the run.

        To be called last: that rank may be the one whose end is the job's, as a PyTorchJob's master is.
        """
        if self.lead is not None:
            self.lead.end(error)
            self.lead = None
