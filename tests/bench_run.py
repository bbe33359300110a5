"""A run of the embedded teacher on the CPU, step by step, for the benchmarks that time the trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from wandistill.config import from_mapping

if TYPE_CHECKING:
    from wandistill.teacher.base import Expert, Teacher
    from wandistill.train.batches import Sampler
    from wandistill.train.loop import Loop
    from wandistill.train.setup import Setup

TOTAL_STEPS = 100_000
BATCH = 32


class BenchRun(NamedTuple):
    """The trainer, and what it is made of."""

    setup: Setup
    teacher: Teacher
    sampler: Sampler
    loop: Loop


def bench_run(
    folder: str, on_step: Callable[[int, dict[str, float], Expert], None] = lambda step, figures, expert: None
) -> BenchRun:
    """A run in `folder` with its caches filled; `BenchRun.loop.take` takes a step of 32 samples."""
    from wandistill import teacher as placement
    from wandistill.data.prepare import prepare_data
    from wandistill.models.student import build_student
    from wandistill.train import distributed
    from wandistill.train.batches import Sampler
    from wandistill.train.loop import Loop
    from wandistill.train.objectives import build_objective
    from wandistill.train.setup import resolve
    from wandistill.train.student import TrainedStudent

    prompts = f"{folder}/prompts.txt"
    with open(prompts, "w") as file:
        file.write("\n".join(f"a large red circle on a {color} background" for color in ("white", "gray", "black")))
    settings = {"device": "cpu", "batch_size": BATCH, "guidance_scale": 3, "output_dir": folder, "data_path": prompts}
    settings |= {"max_steps": TOTAL_STEPS, "rollout_steps": 2, "teacher_device_strategy": "gpu"}
    config = from_mapping(settings)
    world = distributed.start(config)
    setup = resolve(config, world)
    teacher = placement.place(placement.Setting(setup.config, setup.folder, setup.dtype, world))
    data = prepare_data(setup.config, setup.folder, lambda: teacher, world)
    sampler = Sampler(
        setup.config,
        world,
        data,
        total_samples=TOTAL_STEPS * BATCH,
        boundary=setup.folder.boundary,
        shift=setup.config.flow_shift,
    )
    loop = Loop(
        setup.config,
        world,
        TrainedStudent(build_student(setup.folder, setup.spec, "low"), setup.config, world),
        teacher,
        sampler,
        build_objective("velocity", 0, setup.spec.blocks),
        total_steps=TOTAL_STEPS,
        on_step=on_step,
        on_nonfinite=lambda: None,
        is_pause=lambda step: False,
        on_pause=lambda step, last: None,
    )
    return BenchRun(setup, teacher, sampler, loop)
