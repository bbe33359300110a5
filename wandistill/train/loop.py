"""The training loop: ask the teacher, follow with the student, step, tell.

Figures of a step are read one step later, so the host never waits for the GPU in the middle of its work; before a
checkpoint they are read at once, so nothing non-finite is ever saved.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from wandistill.config import TrainConfig
from wandistill.errors import Interrupted, Terminated, TrainingFailed, WandistillError
from wandistill.metrics.names import PARTS
from wandistill.teacher.base import Expert, Teacher, TeacherOutput
from wandistill.train.batches import Batch, Sampler, Step
from wandistill.train.distributed import World
from wandistill.train.objectives import Objective
from wandistill.train.optimizer import set_learning_rate
from wandistill.train.schedule import learning_rate
from wandistill.train.student import TrainedStudent
from wandistill.train.timing import StepTimer

# Places in the row of figures that all ranks add up after each step.
_LOSS, _BAD_TARGETS, _BAD_LOSSES, _SIGINT, _SIGTERM = range(5)


@dataclass
class StepFigures:
    """A step under way: figures on the device, read by `Loop._settle`."""

    step: int
    work: Step
    lr: float
    row: Tensor
    norm: Tensor
    timer: StepTimer
    suspects: list[tuple[Batch, Tensor, Tensor]]  # batch, finite targets [B], losses [B]


class StopSignals:
    """Notes SIGINT and SIGTERM, so that all ranks stop after the same step; a second Ctrl-C stops at once.

    Args:
        told: called with the first signal.
    """

    def __init__(self, told: Callable[[int], None] = lambda number: None) -> None:
        self.received: int | None = None
        self._told = told
        self._former: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = number
            self._told(number)


class Loop:
    """Trains from one step to another.

    Args:
        teacher: the placed teacher, or None with cached targets.
        on_begin: told, as each step begins, what the steps before left for later: work asked ahead, figures to be told.
        on_step: told (step from 1, figures, the expert) after every optimizer step; only rank 0's figures are written.
        on_nonfinite: told that a step's target or loss is not finite, before the error.
        phase: wraps the parts of a step by the planner's name for them.
        on_pause: called after each step with (steps done, last); saves and draws where it is time to. `last` is set
            at the end and when a signal stops the run.
        signal_elsewhere: the signal that a rank outside of training got, if it did.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        student: TrainedStudent,
        teacher: Teacher | None,
        sampler: Sampler,
        objective: Objective,
        *,
        total_steps: int,
        on_step: Callable[[int, dict[str, float], Expert], None],
        on_nonfinite: Callable[[], None],
        is_pause: Callable[[int], bool],
        on_pause: Callable[[int, bool], None],
        on_begin: Callable[[object], None] = lambda left: None,
        phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        signal_elsewhere: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._config, self._world, self._student, self._teacher = config, world, student, teacher
        self._sampler, self._objective, self._total = sampler, objective, total_steps
        self._on_begin, self._on_step, self._on_nonfinite = on_begin, on_step, on_nonfinite
        self._is_pause, self._on_pause, self._phase = is_pause, on_pause, phase
        self._signals, self._signal_elsewhere = StopSignals(), signal_elsewhere
        self._ahead: tuple[Step, Sequence[object]] | None = None
        self._pending: StepFigures | None = None

    def run(self, first: int) -> None:
        """Takes the steps from `first` (from 0) to the last.

        Raises:
            TrainingFailed: a target or a loss is not finite.
            Interrupted, Terminated: a signal came, and the state is saved.
        """
        with self._signals:
            for step in range(first, self._total):
                stopped = self.take(step)
                if stopped or self._is_pause(step + 1):
                    stopped = self._flush() or stopped
                    self._on_pause(step + 1, stopped is not None)
                if stopped:
                    raise stopped

    def take(self, step: int) -> WandistillError | None:
        """Takes optimizer step `step` (from 0) and tells the figures of the one before; returns why to stop, if so."""
        figures = self._step(step)
        stopped = self._flush()
        self._pending = figures
        return stopped

    def _flush(self) -> WandistillError | None:
        """Tells the figures that are still to be told."""
        figures, self._pending = self._pending, None
        return self._settle(figures) if figures else None

    def _step(self, step: int) -> StepFigures:
        config, student = self._config, self._student
        self._on_begin((self._ahead, self._pending))
        timer = StepTimer(self._world.device)
        with timer.part("step"):
            work, tickets = self._ahead or self._ask(step, timer)
            self._ahead = None
            row = torch.zeros(5, dtype=torch.float64, device=self._world.device)
            suspects = []
            for index, (batch, ticket) in enumerate(zip(work.batches, tickets, strict=True)):
                last = index == len(work.batches) - 1
                with timer.part("teacher"), self._phase("teacher"):
                    target = self._target(batch, ticket)
                if last and step + 1 < self._total:
                    # The teacher's next step does not depend on the student's: a placement that can works on it
                    # during the student's backward.
                    self._ahead = self._ask(step + 1, timer)
                with timer.part("student"), self._phase("student"), student.accumulate(last=last):
                    with timer.part("forward"):
                        velocity, features = student(
                            batch.x, batch.t, batch.prompt.positive, self._objective.student_blocks
                        )
                    losses = self._objective(velocity, features, target) * batch.weight
                    student.backward(losses.sum() * self._world.size / work.samples)
                finite = torch.isfinite(target.velocity).flatten(1).all(1)
                losses = losses.detach()
                row[_LOSS] += losses.sum() / work.samples
                row[_BAD_TARGETS] += (~finite).sum()
                row[_BAD_LOSSES] += (~torch.isfinite(losses)).sum()
                suspects.append((batch, finite, losses))
            with timer.part("optimizer"), self._phase("optimizer"):
                lr = learning_rate(step, self._total, config.lr, config.warmup_steps)
                set_learning_rate(student.optimizer, lr)
                norm = student.step(step, config.max_grad_norm)
        received = self._signals.received or self._signal_elsewhere()
        if received is not None:
            row[_SIGINT if received == signal.SIGINT else _SIGTERM] = 1
        with timer.part("collective"):
            self._world.sum_(row)
        return StepFigures(step, work, lr, row, norm, timer, suspects)

    def _ask(self, step: int, timer: StepTimer) -> tuple[Step, Sequence[object]]:
        """The work of a step and its tickets: all requests are made before the first answer is awaited."""
        config, teacher = self._config, self._teacher
        with timer.part("data"):
            work = self._sampler.step(step)
        if teacher is None:
            return work, [None] * len(work.batches)
        guidance = config.guidance_scale if work.expert.name == "HIGH" else config.guidance_low
        return work, [
            teacher.request(b.x, b.t, b.prompt, work.expert, guidance, self._objective.teacher_blocks)
            for b in work.batches
        ]

    def _target(self, batch: Batch, ticket: object) -> TeacherOutput:
        if self._teacher is None:
            assert batch.velocity is not None
            return TeacherOutput(batch.velocity, {})
        return self._teacher.result(ticket)

    def _settle(self, figures: StepFigures) -> WandistillError | None:
        """Reads a step's figures, tells them, and returns the error that a signal asks for."""
        row = figures.row.tolist()
        if row[_BAD_TARGETS] or row[_BAD_LOSSES] or not math.isfinite(row[_LOSS]):
            self._on_nonfinite()
            self._fail(figures)
        seconds = figures.timer.seconds()
        self._on_step(
            figures.step + 1,
            {
                "loss": row[_LOSS],
                "lr": figures.lr,
                "grad_norm": figures.norm.item(),
                "samples": figures.work.samples / self._world.size,
                **{f"{part}_seconds": seconds.get(part, 0.0) for part in PARTS},
            },
            figures.work.expert,
        )
        if row[_SIGINT]:
            return Interrupted("stopped by Ctrl-C; the state is saved, the same command goes on from there.")
        if row[_SIGTERM]:
            return Terminated("stopped by SIGTERM; the state is saved, the same command goes on from there.")
        return None

    def _fail(self, figures: StepFigures) -> None:
        """Every rank comes here in the same step; the message names the first bad sample of all ranks."""
        found = ""
        for batch, finite, losses in figures.suspects:
            for sample, t, good, loss in zip(
                batch.samples, batch.t.tolist(), finite.tolist(), losses.tolist(), strict=True
            ):
                if not found and not (good and math.isfinite(loss)):
                    tensor = "loss" if good else "teacher's target"
                    found = f"the {tensor} of sample {sample} at t = {t:.4f}"
        named = [text for text in self._world.gather(found) if text]
        raise TrainingFailed(
            f"step {figures.step + 1}: {named[0] if named else 'the loss'} is not finite. The last checkpoint is "
            "good. A float16 teacher overflows in places (use --teacher_dtype bfloat16); else lower --lr or "
            "--max_grad_norm, or look at the data of that sample."
        )
