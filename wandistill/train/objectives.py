"""What the student is asked to match, behind one small protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from wandistill.teacher.base import TeacherOutput


class Objective(Protocol):
    """A loss per sample."""

    @property
    def teacher_blocks(self) -> tuple[int, ...]:
        """Blocks of the teacher whose features the loss needs."""
        ...

    @property
    def student_blocks(self) -> tuple[int, ...]:
        """Blocks of the student whose features it compares with them."""
        ...

    def __call__(self, velocity: Tensor, features: Sequence[Tensor], target: TeacherOutput) -> Tensor:
        """The loss of each sample [B] of the student's velocity [B, C, F, H, W] and block features [B, N, D]."""
        ...


@dataclass(frozen=True)
class VelocityObjective:
    """Mean square error of the velocity; `normalized` divides it by the target's mean square, per sample.

    Guided velocities are largest at low noise; normalised, every noise level weighs the same.
    """

    normalized: bool = False
    teacher_blocks: tuple[int, ...] = ()
    student_blocks: tuple[int, ...] = ()

    def __call__(self, velocity: Tensor, features: Sequence[Tensor], target: TeacherOutput) -> Tensor:
        error = (velocity.float() - target.velocity).square().flatten(1).mean(1)
        if self.normalized:
            error = error / target.velocity.square().flatten(1).mean(1).clamp(min=1e-3)
        return error


@dataclass(frozen=True)
class FeatureObjective:
    """`base` plus `weight` times the mean square error of mapped block features relative to the teacher's."""

    base: VelocityObjective
    weight: float
    teacher_blocks: tuple[int, ...]
    student_blocks: tuple[int, ...]

    def __call__(self, velocity: Tensor, features: Sequence[Tensor], target: TeacherOutput) -> Tensor:
        loss = self.base(velocity, features, target)
        for student, block in zip(features, self.teacher_blocks, strict=True):
            teacher = target.features[block]
            error = (student.float() - teacher).square().flatten(1).mean(1)
            scale = teacher.square().flatten(1).mean(1).clamp(min=1e-6)
            loss = loss + self.weight / len(self.teacher_blocks) * error / scale
        return loss


def build_objective(name: str, feature_weight: float, blocks: Sequence[int]) -> Objective:
    """The objective of a configuration; `blocks` gives the teacher's block of each block of the student."""
    base = VelocityObjective(normalized=name == "velocity_normalized")
    if feature_weight == 0:
        return base
    return FeatureObjective(base, feature_weight, tuple(blocks), tuple(range(len(blocks))))
