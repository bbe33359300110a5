"""`wandistill sample` and `wandistill export`, as the command line calls them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from wandistill.config import TrainConfig
from wandistill.errors import ConfigError
from wandistill.models import export_command, sample_command
from wandistill.models.export import export_student, read_settings
from wandistill.models.sampling import sample_folder, to_pictures
from wandistill.models.student import Student, build_student
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.student_config import student_spec
from wandistill.train import checkpoint
from wandistill.train.distributed import World

TinyWan = Callable[[str], Path]
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))


def call(command: object, *arguments: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)  # type: ignore[attr-defined]
    return command.run(parser.parse_args([str(argument) for argument in arguments]))  # type: ignore[attr-defined]


def make_run(directory: Path, teacher: WanFolder, *, average: bool = False, exported: bool = True) -> Student:
    """A finished run's directory with two checkpoints; the second's student is returned."""
    spec = student_spec({"blocks": [0, 2]}, teacher.architecture)
    config = dataclasses.replace(
        TrainConfig(),
        teacher_path=str(teacher.path),
        output_dir=str(directory),
        resolution="32x32",
        flow_shift=2.5,
        sample_steps=2,
        ema_decay=0.9 if average else 0.0,
    )
    directory.mkdir(parents=True, exist_ok=True)
    record = {
        "schema": 1,
        "config": dataclasses.asdict(config),
        "teacher": {"path": str(teacher.path)},
        "student": {"config": spec.to_config()},
    }
    (directory / "run.json").write_text(json.dumps(record))
    for step, init in ((1, "high"), (2, "low")):
        student = build_student(teacher, spec, init)
        state = {"student": {name: tensor.detach() for name, tensor in student.named_parameters()}}
        if average:
            state["average"] = {name: tensor + 1 for name, tensor in state["student"].items()}
        checkpoint.save(directory / "checkpoints", step, state, {}, ALONE, keep=5)
    if exported:
        export_student(student.transformer, teacher, directory / "student", resolution=(32, 32), steps=2, shift=2.5)
    return student


@pytest.fixture
def teacher(tiny_wan: TinyWan) -> WanFolder:
    return open_teacher(str(tiny_wan("t2v-a14b")))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "transformer/diffusion_pytorch_model.safetensors")


class TestSample:
    def test_a_runs_student_is_drawn_as_its_readme_calls_it(
        self, teacher: WanFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        make_run(tmp_path / "run", teacher)
        assert call(sample_command, tmp_path / "run", "--prompt", "A red circle!", "--seed", 3) == 0
        (path,) = capsys.readouterr().out.split()
        assert Path(path) == tmp_path / "run/samples/00-a-red-circle-seed3.png"
        student = open_teacher(str(tmp_path / "run/student"))
        expected = sample_folder(student, ["A red circle!"], steps=2, resolution=(32, 32), seed=3)
        np.testing.assert_array_equal(np.asarray(Image.open(path)), np.asarray(to_pictures(expected)[0]))

    def test_prompts_from_a_file_and_flags_are_drawn_with_a_grid(
        self, teacher: WanFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        make_run(tmp_path / "run", teacher)
        (tmp_path / "prompts.txt").write_text("a cat\n\na blue square\n")
        where = ("--prompts", tmp_path / "prompts.txt", "--prompt", "a red circle", "--output_dir", tmp_path / "out")
        size = ("--resolution", "64x32", "--steps", 1)
        assert call(sample_command, tmp_path / "run/student", *where, *size) == 0
        paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
        assert [path.name for path in paths] == [
            "00-a-red-circle-seed0.png",
            "01-a-cat-seed0.png",
            "02-a-blue-square-seed0.png",
            "grid.png",
        ]
        assert [Image.open(path).size for path in paths] == [(64, 32)] * 3 + [(128, 64)]

    def test_a_teacher_is_guided_by_default(self, teacher: WanFolder, tmp_path: Path):
        arguments = ("--prompt", "a cat", "--steps", 2, "--resolution", "32x32", "--device", "cpu")
        assert call(sample_command, teacher.path, *arguments, "--output_dir", tmp_path) == 0
        expected = sample_folder(teacher, ["a cat"], steps=2, resolution=(32, 32), guidance=3.0)
        drawn = Image.open(tmp_path / "00-a-cat-seed0.png")
        np.testing.assert_array_equal(np.asarray(drawn), np.asarray(to_pictures(expected)[0]))

    def test_guiding_a_student_twice_and_cutting_a_prompt_are_remarked_on(
        self, teacher: WanFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ):
        make_run(tmp_path / "run", teacher)
        call(sample_command, tmp_path / "run", "--prompt", "a cat " * 400, "--guidance_scale", 2, "--steps", 1)
        assert "guides twice" in caplog.text
        assert "1 of 1 prompts have more than 512 tokens" in caplog.text

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((), "there is nothing to draw"),
            (("--prompt", "a", "--steps", "0"), r"--steps 0: must be at least 1"),
            (("--prompt", "a", "--guidance_scale", "-1"), r"--guidance_scale -1\.0: must be at least 0"),
            (("--prompt", "a", "--resolution", "30x32"), r"30x32 does not fit"),
            (("--prompt", "a", "--resolution", "big"), r"WIDTHxHEIGHT"),
            (("--prompts", "missing.txt"), r"missing\.txt"),
        ],
    )
    def test_bad_settings_are_named(self, teacher: WanFolder, tmp_path: Path, arguments: tuple[str, ...], message: str):
        make_run(tmp_path / "run", teacher)
        with pytest.raises(ConfigError, match=message):
            call(sample_command, tmp_path / "run", *arguments)

    def test_a_run_without_a_student_is_told_what_to_do(self, teacher: WanFolder, tmp_path: Path):
        make_run(tmp_path / "run", teacher, exported=False)
        with pytest.raises(ConfigError, match=r"has not exported its student yet.*wandistill export"):
            call(sample_command, tmp_path / "run", "--prompt", "a cat")


class TestExport:
    def test_the_newest_checkpoint_becomes_the_runs_student(
        self, teacher: WanFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        trained = make_run(tmp_path / "run", teacher, exported=False)
        assert call(export_command, tmp_path / "run") == 0
        assert capsys.readouterr().out.strip() == str(tmp_path / "run/student")
        weights = stored(tmp_path / "run/student")
        assert all(torch.equal(weights[name], tensor) for name, tensor in trained.transformer.state_dict().items())
        settings = read_settings(tmp_path / "run/student")
        assert settings is not None and (settings.steps, settings.width, settings.flow_shift) == (2, 32, 2.5)

    def test_a_named_checkpoint_is_taken_instead(self, teacher: WanFolder, tmp_path: Path):
        make_run(tmp_path / "run", teacher, exported=False)
        assert call(export_command, tmp_path / "run", "--checkpoint", "step-1", "--output", tmp_path / "first") == 0
        spec = student_spec({"blocks": [0, 2]}, teacher.architecture)
        expected = build_student(teacher, spec, "high").transformer.state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in stored(tmp_path / "first").items())

    @pytest.mark.parametrize(("flags", "offset"), [((), 1), (("--ema",), 1), (("--no_ema",), 0), (("--no-ema",), 0)])
    def test_the_average_is_taken_where_there_is_one(
        self, teacher: WanFolder, tmp_path: Path, flags: tuple[str, ...], offset: int
    ):
        trained = make_run(tmp_path / "run", teacher, average=True, exported=False)
        assert call(export_command, tmp_path / "run", *flags) == 0
        weights = stored(tmp_path / "run/student")
        expected = trained.transformer.state_dict()
        assert all(torch.equal(tensor, expected[name] + offset) for name, tensor in weights.items())

    def test_comfyui_gets_one_file(self, teacher: WanFolder, tmp_path: Path):
        make_run(tmp_path / "run", teacher, exported=False)
        assert call(export_command, tmp_path / "run", "--format", "comfyui", "--dtype", "bfloat16") == 0
        names = load_file(tmp_path / "run/student.safetensors")
        assert all(name.startswith("model.diffusion_model.") for name in names)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--checkpoint", "step-9"), r"step-9: is not there; .*has step-2, step-1"),
            (("--ema",), "holds no average weights"),
        ],
    )
    def test_what_is_not_there_is_named(
        self, teacher: WanFolder, tmp_path: Path, arguments: tuple[str, ...], message: str
    ):
        make_run(tmp_path / "run", teacher, exported=False)
        with pytest.raises(ConfigError, match=message):
            call(export_command, tmp_path / "run", *arguments)

    def test_a_folder_that_is_no_run_is_refused(self, tmp_path: Path):
        with pytest.raises(ConfigError, match=r"holds no run\.json"):
            call(export_command, tmp_path)
