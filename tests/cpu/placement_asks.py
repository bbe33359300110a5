"""What the placements' suite asks of a teacher, and how far two teachers' answers are apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from engine_setup import Ask
from torch import Tensor

from wandistill.teacher import Setting
from wandistill.teacher.base import Expert, Prompt, Teacher, TeacherOutput


def steps(setting: Setting) -> list[list[Ask]]:
    """Requests of a few steps, as a run makes them: micro-batches of one expert, then another phase's shapes."""
    folder, rank = setting.folder, setting.world.rank
    last = folder.architecture.num_layers - 1
    low = folder.experts[-1]
    generator = torch.Generator().manual_seed(17 + rank)

    def ask(expert: Expert, batch: int, guidance: float, features: tuple[int, ...], tall: int = 2) -> Ask:
        step = folder.spatial_factor * folder.architecture.patch_size[1]
        latents = folder.latent_shape(2 * step, tall * step)
        width = folder.architecture.text_dim
        return Ask(
            torch.randn(batch, *latents, generator=generator),
            torch.rand(batch, generator=generator),
            Prompt(
                torch.randn(batch, 5, width, generator=generator),
                torch.randn(1, 5, width, generator=torch.Generator().manual_seed(1)),
            ),
            expert,
            guidance,
            features,
        )

    return [
        [ask(Expert.HIGH, 2, 4.0, (0, last)) for _ in range(2)],
        [ask(low, 2, 3.0, (1,)) for _ in range(2)],
        [ask(low, 3, 1.0, (), tall=3)],  # another phase, other shapes
        [ask(Expert.HIGH, 1 + rank % 2, 4.0, (last,))],  # uneven over the ranks
    ]


def answers(teacher: Teacher, script: Sequence[Sequence[Ask]]) -> list[TeacherOutput]:
    """The answers to all steps; a step's requests are made when the last answer of the one before it is there."""
    found = []
    tickets: list[object] = []
    for step in [*script, []]:
        found += [teacher.result(ticket) for ticket in tickets]
        tickets = [teacher.request(a.x, a.t, a.prompt, a.expert, a.guidance, a.features) for a in step]
    return found


def distance(ours: Sequence[TeacherOutput], theirs: Sequence[TeacherOutput]) -> float:
    """The greatest relative L2 distance of any velocity or feature; infinite where shapes or numbers are wrong."""

    def apart(a: Tensor, b: Tensor) -> float:
        if a.shape != b.shape or a.dtype != torch.float32 or not torch.isfinite(a).all():
            return float("inf")
        return ((a - b).double().norm() / b.double().norm()).item()

    found = [float("inf")] if len(ours) != len(theirs) else [0.0]
    for a, b in zip(ours, theirs, strict=False):
        found.append(apart(a.velocity, b.velocity) if a.features.keys() == b.features.keys() else float("inf"))
        found += [apart(a.features[index], b.features[index]) for index in a.features.keys() & b.features.keys()]
    return max(found)
