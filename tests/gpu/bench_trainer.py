"""Whole training steps of the benchmark, against the teacher's and the student's time measured apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.gpu.bench_measure import Shape, Usage, slowest
from wandistill.config import parse_resolution
from wandistill.models.student import empty_student
from wandistill.student_config import student_spec
from wandistill.teacher import Setting, place
from wandistill.teacher.base import Expert, Prompt, Teacher, TeacherOutput
from wandistill.teacher.gpu0 import serving_rank
from wandistill.teacher.pipeline import PipelineTeacher
from wandistill.train.batches import Sampler
from wandistill.train.distributed import World
from wandistill.train.loop import Loop
from wandistill.train.objectives import build_objective
from wandistill.train.student import TrainedStudent

WARM_UP, STEPS = 3, 10
_ITEMS = 16


class RandomData:
    """Latents and prompts of a run."""

    def __init__(self, setting: Setting, sized: Shape) -> None:
        folder = setting.folder
        generator = torch.Generator().manual_seed(0)
        shape = folder.latent_shape(*parse_resolution(sized.resolution))
        self._latents = torch.randn(_ITEMS, *shape, generator=generator)
        self._prompts = torch.randn(_ITEMS, sized.prompt, folder.architecture.text_dim, generator=generator)
        self.negative = self._prompts[:1]

    def __len__(self) -> int:
        return _ITEMS

    def batch(self, items: list[int]) -> tuple[Tensor, Tensor]:
        return self._latents[items], self._prompts[items]

    def states(self, items: list[int], draws: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("no targets are cached")


class Known:
    """A teacher that has the answer already: with it a step takes what the student takes."""

    def request(
        self, x: Tensor, t: Tensor, prompt: Prompt, expert: Expert, guidance: float, features: Sequence[int] = ()
    ) -> Tensor:
        return x

    def result(self, ticket: Any) -> TeacherOutput:
        return TeacherOutput(ticket.float(), {})

    def weight(self, expert: Expert, name: str) -> Tensor | None:
        """None."""
        return None

    def close(self) -> None:
        """Nothing to do."""


def measure(setting: Setting, shape: Shape, teacher_seconds: float) -> dict[str, Any]:
    """A row's figures; all ranks of the job call this together.

    Args:
        setting: of the teacher's place and of the student.
        shape: what a rank asks for.
        teacher_seconds: that the resident teacher takes for the batch of one rank.

    Returns:
        The step's seconds; the student's alone, and the teacher's for all batches that its GPU computes; and what the
        step should take: their sum, or the longer of the two where a GPU has the teacher only.
    """
    world = setting.world
    usage = Usage(world)
    teacher = place(setting)
    usage.placed()
    serving = serving_rank(setting.config, world)
    training = world if serving is None else world.without(serving)
    alone: list[float] = []
    steps: list[float] = []
    if training.takes_part:
        trained = _student(setting, training)
        alone = _steps(setting, shape, training, trained, Known())
        steps = _steps(setting, shape, training, trained, teacher)
    else:
        assert isinstance(teacher, PipelineTeacher)
        teacher.serve()
    teacher.close()
    found = [ranks for ranks in world.gather((alone, steps)) if ranks[0]]
    student = max(sorted(own)[len(own) // 2] for own, _ in found)
    # gpu0's one GPU computes for all ranks; elsewhere each GPU computes as much as one rank asks for.
    batches = training.size if setting.config.teacher_device_strategy == "gpu0" else 1
    teacher_alone = teacher_seconds * batches
    expected = teacher_alone + student if serving is None else max(teacher_alone, student)
    row = slowest(steps, training) if training.takes_part else None
    row = next(one for one in world.gather(row) if one is not None)
    return {
        **row,
        "student_seconds": round(student, 6),
        "teacher_alone_seconds": round(teacher_alone, 6),
        "expected_seconds": round(expected, 6),
        "ratio_to_expected": round(row["seconds"] / expected, 4),
        **usage.row(),
    }


def _student(setting: Setting, training: World) -> TrainedStudent:
    """Of random weights, the same on every rank, drawn on the device: a CPU takes a minute for half of 14 B."""
    spec = student_spec(setting.config.student_config, setting.folder.architecture)
    trained = TrainedStudent(empty_student(setting.folder, spec), setting.config, training)
    torch.manual_seed(0)
    for parameter in trained.module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return trained


def _steps(setting: Setting, shape: Shape, training: World, trained: TrainedStudent, teacher: Teacher) -> list[float]:
    """Seconds of each step after the warm-up."""
    config, folder = setting.config, setting.folder
    total = WARM_UP + STEPS
    samples = total * config.batch_size * training.size
    sampler = Sampler(
        config,
        training,
        RandomData(setting, shape),
        total_samples=samples,
        boundary=folder.boundary,
        shift=folder.flow_shift,
    )
    seconds: list[float] = []
    loop = Loop(
        config,
        training,
        trained,
        teacher,
        sampler,
        build_objective("velocity", 0, ()),
        total_steps=total,
        on_step=lambda step, figures, expert: seconds.append(figures["step_seconds"]),
        on_nonfinite=lambda: None,
        is_pause=lambda step: step == total,
        on_pause=lambda step, last: None,
    )
    loop.run(0)
    return seconds[WARM_UP:]
