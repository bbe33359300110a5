"""The README's table of placements, from rows of the GPU benchmark."""

from __future__ import annotations

from typing import Any

from tests.readme_bench import table


def row(case: str, ranks: int, batch: int, seconds: float, ratio: float | None = None) -> dict[str, Any]:
    sizes = {
        "gpu_placed_bytes": [2 * 10**9] * ranks,
        "gpu_process_bytes": [(3 + rank) * 10**9 for rank in range(ranks)],
    }
    shape = {"case": case, "ranks": ranks, "resolution": "832x480", "batch": batch}
    return {**shape, "seconds": seconds, "ratio_to_resident": ratio, "host_bytes": 28_600_000_000, **sizes}


def test_a_line_has_both_batches_and_samples_of_all_ranks_beside_those_of_cpu() -> None:
    rows = [row("stream", 2, 1, 0.5, 0.18), row("stream", 2, 8, 0.75, 0.99), row("cpu", 1, 1, 10.0)]
    lines = table(rows).splitlines()[2:]
    assert lines == [
        "| cpu | 1 | 2.0 | 3.0 | 28.6 | 0.1 | 1 |  |  |",
        "| stream | 2 | 2.0 | 3.0, 4.0 | 28.6 | 4 | 40 | 0.180 | 0.990 |",
    ]


def test_whole_training_steps_are_no_forwards() -> None:
    forwards = [row("stream", 1, 1, 0.5, 0.18), row("stream", 1, 8, 0.75, 0.99)]
    steps = [row(case, 1, 8, 1.0) | {"student_seconds": 0.4} for case in ("stream-trains-half", "stream")]
    assert table([*forwards, *steps]) == table(forwards)
