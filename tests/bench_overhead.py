"""`make bench`: what the trainer costs beyond the arithmetic that it is for.

In one process and on the same tensors, the trainer's whole steps are timed against a bare loop of the teacher's guided
forward, the student's forward and backward, and AdamW. The two take turns, so that a drift of the machine hits both;
the medians' ratio is printed.
"""

from __future__ import annotations

import statistics
import tempfile
import time

from tests.bench_run import bench_run

ROUNDS = 12
WARM_UP = 2


def main() -> None:
    """Prints one line with both times and their ratio."""
    import torch
    from torch.nn.functional import mse_loss

    from wandistill.models.student import build_student
    from wandistill.teacher.base import Request

    with tempfile.TemporaryDirectory() as folder:
        setup, teacher, sampler, loop = bench_run(folder)
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
