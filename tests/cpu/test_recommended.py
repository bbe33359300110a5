"""What the seed project's guides recommend for some hardware trains here with the same flags, on CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import Ranks
from runs import SHORT, flags, losses

from wandistill.demo.captions import training_prompts

# Five configurations, then four rows of hardware: name -> ranks, flags, the placement that they stand for.
RECOMMENDED = {
    "1x 24 GB": (1, "--teacher_on_cpu --teacher_dtype float16 --batch_size 1", "cpu"),
    "1x 48 GB": (1, "--teacher_dtype float16 --batch_size 2", "gpu"),
    "2x 24 GB": (2, "--balanced_teacher --teacher_dtype float16 --batch_size 2", "balanced"),
    "4x 40 GB": (4, "--distributed --teacher_dtype float16 --batch_size 4", "gpu"),
    "CPU only": (1, "--teacher_on_cpu --batch_size 1", "cpu"),
    "4x A100 80 GB": (4, "--distributed --teacher_device_strategy balanced", "balanced"),
    "4x RTX 3090": (4, "--distributed --teacher_device_strategy cpu --teacher_dtype float16", "cpu"),
    "2x A6000": (2, "--distributed --teacher_device_strategy balanced --teacher_dtype float16", "balanced"),
    "1x A100 80 GB": (1, "--teacher_dtype float16", "gpu"),
}
QUICK = ("1x 24 GB", "2x 24 GB")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RECOMMENDED]
)
def test_it_trains_with_the_teacher_where_the_flags_say(name: str, tmp_path: Path) -> None:
    ranks, chosen, placement = RECOMMENDED[name]
    (tmp_path / "prompts.txt").write_text("\n".join(training_prompts(8)), encoding="utf-8")
    output = tmp_path / "out"
    settings = {**SHORT, "data_path": tmp_path / "prompts.txt", "output_dir": output, "max_steps": 3}
    Ranks(ranks, flags(settings, *chosen.split()), tmp_path / "log").finish()
    assert len(losses(output)) == 3
    assert json.loads((output / "run.json").read_text())["config"]["teacher_device_strategy"] == placement
