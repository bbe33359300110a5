"""`prepare_data` says what it will write, refuses what does not fit, builds, and gives training items."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data_helpers import CountingTeacher, world
from PIL import Image

from wandistill.config import TrainConfig
from wandistill.data import building, command
from wandistill.data.prepare import prepare_data
from wandistill.errors import ConfigError, DoesNotFit
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.planner.timing import PrepareCost

PROMPTS = ["a red circle", "a cat", "blue", "a cat"]


@pytest.fixture
def folder(tiny_wan: Callable[[str], Path]) -> WanFolder:
    return open_teacher(str(tiny_wan("t2v-a14b")))


def configure(tmp_path: Path, folder: WanFolder, **changes: Any) -> TrainConfig:
    data = tmp_path / "prompts.txt"
    data.write_text("\n".join(PROMPTS))
    values = {
        "teacher_path": str(folder.path),
        "data_path": str(data),
        "output_dir": str(tmp_path / "out"),
        "resolution": "32x32",
        "rollout_steps": 2,
        "flow_shift": 3.0,
        "guidance_scale_2": 3.0,
        "teacher_dtype": "float32",
    }
    return TrainConfig(**{**values, **changes})


def no_teacher() -> Any:
    raise AssertionError("no teacher may be loaded")


def test_items_are_latents_with_their_prompts_embeddings(folder: WanFolder, tmp_path: Path) -> None:
    config = configure(tmp_path, folder, rollouts_per_prompt=2)
    data = prepare_data(config, folder, CountingTeacher, world())
    assert len(data) == 8
    assert data.prompts == PROMPTS
    x0, embeddings = data.batch([0, 1, 2, 7])
    assert x0.shape == (4, *folder.latent_shape(32, 32))
    assert embeddings.shape == (4, folder.token_length, folder.architecture.text_dim)
    assert torch.equal(embeddings[0], embeddings[1]), "two rollouts of one prompt"
    assert torch.equal(embeddings[2], embeddings[3]), "the same prompt twice in the file"
    assert len({tuple(latent.flatten().tolist()) for latent in data.batch(range(8))[0]}) == 8
    assert data.negative.shape == (1, folder.token_length, folder.architecture.text_dim)
    assert data.sample_prompts == ["a red circle", "a cat", "blue"]
    assert data.sample_embeddings().shape == (3, folder.token_length, folder.architecture.text_dim)


def test_a_second_run_loads_no_teacher(folder: WanFolder, tmp_path: Path) -> None:
    config = configure(tmp_path, folder, targets="cached")
    first = prepare_data(config, folder, CountingTeacher, world())
    second = prepare_data(config, folder, no_teacher, world())
    assert all(torch.equal(a, b) for a, b in zip(first.batch([3, 1]), second.batch([3, 1]), strict=True))
    x, t, v = second.states([3, 1], [2**30 + 1, 0])
    assert x.shape == v.shape == (2, *folder.latent_shape(32, 32))
    assert t[1] == 1 and 0 < t[0] < 1


def test_embeddings_online_fill_no_cache_of_their_own(folder: WanFolder, tmp_path: Path) -> None:
    data = prepare_data(configure(tmp_path, folder, embeddings="online"), folder, CountingTeacher, world())
    assert sorted(path.name for path in (tmp_path / "out" / "cache").iterdir()) == ["rollouts"]
    cached = prepare_data(configure(tmp_path, folder), folder, no_teacher, world())
    torch.testing.assert_close(data.batch([0, 1])[1], cached.batch([0, 1])[1], rtol=1e-5, atol=1e-6)


def test_pictures_are_training_items(folder: WanFolder, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for index, color in enumerate(["red", "blue"]):
        Image.new("RGB", (32, 32), color).save(pictures / f"{index}.png")
        (pictures / f"{index}.txt").write_text(f"a {color} square")
    config = configure(tmp_path, folder, data_path=str(pictures), rollouts_per_prompt=3)
    data = prepare_data(config, folder, no_teacher, world())
    assert len(data) == 2
    assert data.prompts == ["a red square", "a blue square"]
    assert data.batch([1, 0])[0].shape == (2, *folder.latent_shape(32, 32))


def test_it_says_beforehand_what_it_will_write(
    folder: WanFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        prepare_data(configure(tmp_path, folder), folder, CountingTeacher, world())
    text = caplog.text
    assert "prompt embeddings: 0 of 4" in text and "4 to build" in text
    assert "rollouts: 0 of 4" in text and "4.0 KiB to write" in text
    assert "free" in text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        prepare_data(configure(tmp_path, folder), folder, no_teacher, world())
    assert "rollouts: 4 of 4" in caplog.text and "complete" in caplog.text


def test_only_the_first_rank_talks(
    folder: WanFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_data(configure(tmp_path, folder), folder, CountingTeacher, world())
    caplog.clear()
    capsys.readouterr()
    with caplog.at_level(logging.INFO):
        prepare_data(configure(tmp_path, folder), folder, no_teacher, world(1, 2))
    assert not caplog.text
    assert not capsys.readouterr().err


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    folder: WanFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "free_bytes", lambda path: 4000)
    with pytest.raises(DoesNotFit) as caught:
        prepare_data(configure(tmp_path, folder), folder, no_teacher, world())
    for said in ("--cache_dir", "3.9 KiB free", "4.0 KiB to write", str(tmp_path)):
        assert said in str(caught.value)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_the_time_is_told_before_anything_is_built_and_after_the_first_batch(
    folder: WanFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(building, "_SHORT_SECONDS", 0.0)
    data = tmp_path / "many.txt"
    data.write_text("\n".join(f"{index} cats" for index in range(70)))
    cost = PrepareCost(prompts=1, embedding_bytes=1, embedding_seconds=0.5, latent_bytes=1, latent_seconds=360.0)
    with caplog.at_level(logging.INFO):
        prepare_data(configure(tmp_path, folder, data_path=str(data)), folder, CountingTeacher, world(), cost)
    planned, measured = caplog.text.index("about 7 hours"), caplog.text.index("rollouts: 6 are left, about")
    assert "to write, about 7 hours (7 h 00 min) as planned" in caplog.text
    assert planned < measured and "at the pace of the first batch" in caplog.text


def test_prompts_that_are_cut_are_counted_in_a_warning(
    folder: WanFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(tmp_path, folder)
    Path(config.data_path).write_text("a cat\n" + "circle " * 600 + "\n")
    for teacher in (CountingTeacher, no_teacher):
        caplog.clear()
        prepare_data(config, folder, teacher, world())
        assert "1 of 2 prompts are longer than the 512 tokens" in caplog.text


def test_the_command_fills_the_caches_that_train_reads(
    folder: WanFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path, folder, flow_shift=0.0, guidance_scale_2=0.0, device="cpu")
    monkeypatch.setattr(command.placement, "place", lambda setting: CountingTeacher())
    command.prepare(config)
    resolved = configure(tmp_path, folder, flow_shift=folder.flow_shift, guidance_scale_2=4.0, device="cpu")
    assert len(prepare_data(resolved, folder, no_teacher, world())) == 4


def test_a_bad_data_path_ends_before_the_cache_is_made(folder: WanFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        prepare_data(configure(tmp_path, folder, data_path="nowhere.txt"), folder, no_teacher, world())
    assert not (tmp_path / "out").exists()


def test_the_embeddings_alone_need_no_teacher_and_are_those_of_the_run(
    folder: WanFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from wandistill.cli import main
    from wandistill.launch import prepared

    config = configure(tmp_path, folder)
    values = {name: getattr(config, name) for name in ("teacher_path", "data_path", "output_dir", "teacher_dtype")}
    flags = [text for name, value in values.items() for text in (f"--{name}", value)]
    monkeypatch.setattr("wandistill.teacher.place", no_teacher)
    assert main(["prepare", "--only", "embeddings", "--device", "cpu", *flags]) == 0
    prepared.wait(config, 0)
    monkeypatch.setattr("wandistill.models.wan.WanFolder.load_text_encoder", no_teacher)
    data = prepare_data(config, folder, CountingTeacher, world())
    assert data.prompts == PROMPTS
