"""Which prompts a student is evaluated on, and what is said about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wandistill.config import TrainConfig
from wandistill.demo.captions import heldout_prompts, scene_number, student_holds_out, training_prompts
from wandistill.errors import ConfigError
from wandistill.evaluate.prompts import EvaluationPrompts, choose_prompts


def choose(config: TrainConfig, **options: Any) -> EvaluationPrompts:
    return choose_prompts(config, **{"embedded": False, "file": None, "column": "", "count": None, "seed": 0} | options)


def write(path: Path, prompts: list[str]) -> str:
    path.write_text("".join(f"{prompt}\n" for prompt in prompts))
    return str(path)


def test_the_embedded_teacher_has_512_held_out_captions():
    chosen = choose(TrainConfig(), embedded=True)
    assert len(chosen.prompts) == 512 and chosen.seen == 0 and not chosen.notes
    assert all(student_holds_out(scene_number(prompt)) for prompt in chosen.prompts)
    assert choose(TrainConfig(), embedded=True, count=7).prompts == heldout_prompts(7)
    assert choose(TrainConfig(), embedded=True, count=7, seed=1).prompts == heldout_prompts(7, 1)


def test_captions_that_the_student_may_have_seen_are_counted(tmp_path: Path):
    file = Path(write(tmp_path / "p.txt", [*training_prompts(3), *heldout_prompts(2), "a dog"]))
    chosen = choose(TrainConfig(), embedded=True, file=file)
    assert chosen.seen == 3 and chosen.source == str(file)
    assert chosen.notes[0].startswith("3 of the 6 prompts are among the training prompts too")


def test_own_training_data_is_searched_for_the_held_out_captions(tmp_path: Path):
    data = write(tmp_path / "data.txt", [*training_prompts(5), *heldout_prompts(8)[3:5]])
    assert choose(TrainConfig(data_path=data), embedded=True, count=8).seen == 2


def test_prompts_come_from_the_file_then_the_samples_then_the_end_of_the_data(tmp_path: Path):
    data = write(tmp_path / "data.txt", [f"prompt {i}" for i in range(100)])
    samples = write(tmp_path / "samples.txt", ["prompt 7", "new"])
    file = Path(write(tmp_path / "own.txt", ["other 1", "other 2", "other 3"]))
    config = TrainConfig(data_path=data, sample_prompts=samples)
    assert choose(config, file=file, count=2).prompts == ["other 1", "other 2"]
    assert choose(config).prompts == ["prompt 7", "new"]
    last = choose(TrainConfig(data_path=data))
    assert last.prompts == [f"prompt {i}" for i in range(36, 100)] and last.seen == 64
    assert "the last prompts of" not in last.source and data in last.source
    assert [choose(config, file=file).seen, choose(config).seen] == [0, 1]


def test_training_data_that_is_gone_is_told(tmp_path: Path):
    file = Path(write(tmp_path / "own.txt", ["a"]))
    chosen = choose(TrainConfig(data_path=str(tmp_path / "gone.txt")), file=file)
    assert chosen.seen is None and "not there any more" in chosen.notes[0]


def test_captions_of_an_image_folder_are_prompts(tmp_path: Path):
    for index in range(3):
        (tmp_path / f"{index}.png").touch()
        (tmp_path / f"{index}.txt").write_text(f"caption {index}")
    assert choose(TrainConfig(data_path=str(tmp_path)), count=2).prompts == ["caption 1", "caption 2"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"count": 0}, "--count 0"),
        ({"count": -3}, "--count -3"),
        ({}, "--prompts FILE"),
        ({"file": Path("nowhere.txt")}, r"nowhere\.txt"),
    ],
)
def test_what_cannot_be_is_an_error_that_names_it(options: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        choose(TrainConfig(data_path="gone.txt"), **options)
