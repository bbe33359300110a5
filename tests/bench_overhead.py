"""`make bench`: what the trainer costs beyond the arithmetic that it is for.

In one process and on the same tensors, the trainer's whole steps are timed against a bare loop of the teacher's guided
forward, the student's forward and backward, and AdamW. The two take turns, so that a drift of the machine hits both;
the medians' ratio is printed.
"""

from __future__ import annotations

import statistics
import tempfile
import time

from wandistill.config import from_mapping

ROUNDS = 12
WARM_UP = 2


def main() -> None:
    """Prints one line with both times and their ratio."""
    import torch
    from torch.nn.functional import mse_loss

    from wandistill import teacher as placement
    from wandistill.data.prepare import prepare_data
    from wandistill.models.student import build_student
    from wandistill.teacher.base import Request
    from wandistill.train import distributed
    from wandistill.train.batches import Sampler
    from wandistill.train.loop import Loop
    from wandistill.train.objectives import build_objective
    from wandistill.train.setup import resolve
    from wandistill.train.student import TrainedStudent

    with tempfile.TemporaryDirectory() as folder:
        prompts = f"{folder}/prompts.txt"
        with open(prompts, "w") as file:
            file.write("\n".join(f"a large red circle on a {color} background" for color in ("white", "gray", "black")))
        settings = {"device": "cpu", "batch_size": 32, "guidance_scale": 3, "output_dir": folder, "data_path": prompts}
        settings |= {"max_steps": 1000, "rollout_steps": 2, "teacher_device_strategy": "gpu"}
        config = from_mapping(settings)
        world = distributed.start(config)
        setup = resolve(config, world)
        teacher = placement.place(placement.Setting(setup.config, setup.folder, setup.dtype, world))
        data = prepare_data(setup.config, setup.folder, lambda: teacher, world)
        sampler = Sampler(
            setup.config,
            world,
            data,
            total_samples=32_000,
            boundary=setup.folder.boundary,
            shift=setup.config.flow_shift,
        )
        trained = TrainedStudent(build_student(setup.folder, setup.spec, "low"), setup.config, world)
        loop = Loop(
            setup.config,
            world,
            trained,
            teacher,
            sampler,
            build_objective("velocity", 0, setup.spec.blocks),
            total_steps=1000,
            on_step=lambda step, figures, expert: None,
            on_nonfinite=lambda: None,
            is_pause=lambda step: False,
            on_pause=lambda step, last: None,
        )
        bare = build_student(setup.folder, setup.spec, "low")
        optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-4)

        def bare_step(step: int) -> None:
            work = sampler.step(step)
            (batch,) = work.batches
            began = time.perf_counter()
            request = Request(batch.x, batch.t, batch.prompt, work.expert, 3.0, ())
            target = teacher.result(request)
            velocity, _ = bare(batch.x, batch.t, batch.prompt.positive)
            mse_loss(velocity, target.velocity).backward()
            optimizer.step()
            optimizer.zero_grad()
            bare_times.append(time.perf_counter() - began)

        bare_times: list[float] = []
        trainer_times: list[float] = []
        for step in range(ROUNDS + WARM_UP):
            bare_step(step)
            began = time.perf_counter()
            loop.take(step)
            trainer_times.append(time.perf_counter() - began)
        pairs = list(zip(trainer_times[WARM_UP:], bare_times[WARM_UP:], strict=True))
        ratio = statistics.median(trainer / own for trainer, own in pairs)
        print(
            f"trainer {statistics.median(t for t, _ in pairs) * 1e3:.1f} ms a step, bare "
            f"{statistics.median(b for _, b in pairs) * 1e3:.1f} ms, ratio {ratio:.3f} (median of {len(pairs)} pairs)"
        )


if __name__ == "__main__":
    main()
