"""Real ranks, under torchrun and without: the same curve for any number of them, and the same bits after a kill."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ranks import Ranks
from runs import GLOBAL_BATCH, SHORT, finish, flags, here, losses, student_digest, torchrun

from wandistill.demo.captions import training_prompts

WORLDS = (1, 2, 4)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Data and caches that all runs of this file share."""
    folder = tmp_path_factory.mktemp("worlds")
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(training_prompts(24)))
    settings = {**SHORT, "data_path": prompts, "cache_dir": folder / "cache"}
    assert here(["prepare", *flags({**settings, "output_dir": folder / "prepare"})]) == 0
    return settings


def arguments(shared: dict[str, object], ranks: int, output_dir: Path, **more: object) -> list[str]:
    batch = {"batch_size": GLOBAL_BATCH // ranks, "output_dir": output_dir}
    return flags({**shared, **batch, **more})


@pytest.fixture(scope="module")
def straight(shared: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """An undisturbed run of each world, that of two ranks under torchrun."""
    outputs = {}
    for ranks in WORLDS:
        folder = tmp_path_factory.mktemp("straight")
        outputs[ranks] = folder / str(ranks)
        settings = arguments(shared, ranks, outputs[ranks])
        if ranks == 2:
            finish(torchrun(ranks, settings))
        else:
            Ranks(ranks, settings, folder / "log").finish()
    return outputs


@pytest.fixture(scope="module")
def killed(shared: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """For each world, the directory of a run that was killed with SIGKILL after its checkpoint of step 10."""
    outputs = {}
    for ranks in WORLDS:
        folder = tmp_path_factory.mktemp("killed")
        outputs[ranks] = folder / str(ranks)
        _run_and_kill(ranks, arguments(shared, ranks, outputs[ranks]), outputs[ranks], "step-10")
        assert not (outputs[ranks] / "student").exists()
    return outputs


def _run_and_kill(ranks: int, arguments: list[str], output: Path, checkpoint: str) -> None:
    world = Ranks(ranks, arguments, output.with_suffix(".log"))
    world.wait_for(output / "checkpoints" / checkpoint)
    world.kill()


def test_the_loss_curve_is_the_same_on_one_two_and_four_ranks_and_falls(straight):
    curves = {ranks: losses(output) for ranks, output in straight.items()}
    assert len(curves[1]) == 20
    for ranks in (2, 4):
        assert curves[ranks] == pytest.approx(curves[1], rel=1e-5)
    assert sum(curves[1][-5:]) < 0.8 * sum(curves[1][:5])


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_killed_run_goes_on_to_the_same_student_bytes(ranks, shared, straight, killed, tmp_path):
    output = tmp_path / "resumed"
    shutil.copytree(killed[ranks], output)
    printed = Ranks(ranks, arguments(shared, ranks, output), tmp_path / "log").finish()
    assert "continuing from" in printed and "step-10" in printed
    assert losses(output) == losses(straight[ranks])
    assert student_digest(output) == student_digest(straight[ranks])


def test_a_run_of_two_ranks_goes_on_with_one_and_the_same_losses(shared, straight, killed, tmp_path):
    output = tmp_path / "resumed"
    shutil.copytree(killed[2], output)
    assert here(["train", *arguments(shared, 1, output)]) == 0
    assert losses(output) == pytest.approx(losses(straight[2]), rel=1e-5)


def test_a_sharded_student_has_the_losses_of_a_whole_one(shared, straight, tmp_path):
    settings = {"student_parallel": "fsdp", "gradient_accumulation_steps": 2, "batch_size": 1, "max_steps": 20}
    output = tmp_path / "fsdp"
    Ranks(2, flags({**shared, **settings, "output_dir": output}), tmp_path / "log").finish()
    assert losses(output) == pytest.approx(losses(straight[1]), rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw_bf16", "adamw8bit"])
def test_a_sharded_student_in_bfloat16_with_an_average_trains_and_goes_on(optimizer, shared, tmp_path):
    settings = {
        "student_parallel": "fsdp",
        "optimizer": optimizer,
        "ema_decay": 0.9,
        "ema_device": "cpu",
        "checkpoint_interval": 5,
    }
    output = tmp_path / "half"
    flags_of_both = arguments(shared, 2, output, **settings)
    _run_and_kill(2, flags_of_both, output, "step-5")
    Ranks(2, flags_of_both, tmp_path / "log").finish()
    curve = losses(output)
    assert sum(curve[-5:]) < 0.9 * sum(curve[:5])
