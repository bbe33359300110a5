"""`wandistill evaluate`: the student's figures against its teacher's, on whole run directories."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from PIL import Image

from wandistill.cli import main
from wandistill.config import TrainConfig
from wandistill.demo import embedded_teacher_path
from wandistill.errors import ConfigError
from wandistill.evaluate.evaluation import Options, evaluate
from wandistill.models.export import export_student
from wandistill.models.wan import open_teacher
from wandistill.teacher.base import Expert

PROMPTS = ["a red circle", "a blue square", "a cat on a gray background", "a red square", "circle"]


def finished_run(
    folder: Path,
    teacher: str,
    *,
    student: Callable[[WanTransformer3DModel], None] = lambda model: None,
    expert: Expert | None = None,
    resolution: tuple[int, int] = (32, 32),
    **config: Any,
) -> Path:
    """A run directory whose student is one of the teacher's experts, changed by `student`."""
    opened = open_teacher(teacher)
    model = opened.load_transformer(expert or opened.experts[-1], torch.float32, "cpu")
    student(model)
    shift = opened.flow_shift
    export_student(model, opened, folder / "student", resolution=resolution, steps=3, shift=shift)
    data = folder / "prompts.txt"
    data.write_text("\n".join(PROMPTS))
    settings = TrainConfig(
        **{
            "teacher_path": teacher,
            "data_path": str(data),
            "output_dir": str(folder),
            "resolution": "x".join(map(str, resolution)),
            "guidance_scale": 1.0,
            "flow_shift": shift,
            "rollout_steps": 3,
            "sample_steps": 3,
            "teacher_dtype": "float32",
            **config,
        }
    )
    record = {"schema": 1, "state": "finished", "config": dataclasses.asdict(settings)}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("layout", ["t2v-1.3b", "ti2v-5b"])
def test_a_student_that_is_the_teacher_has_no_error(tiny_wan: Callable[[str], Path], tmp_path: Path, layout: str):
    run = finished_run(tmp_path, str(tiny_wan(layout)))
    found = evaluate(run)
    assert found["velocity_error"]["relative_l2"] == 0.0
    assert found["latent_distance"] == found["pixel_distance"] == 0.0
    assert found["latent_distance_unrelated"] > 0 and found["pixel_distance_unrelated"] > 0
    assert found["velocity_error"]["states"] == 3 * len(PROMPTS)
    assert found["student_parameters"] == found["teacher_parameters"] == found["teacher_expert_parameters"]
    assert "teacher_accuracy" not in found and "student_accuracy" not in found


def test_each_expert_answers_for_its_times(tiny_wan: Callable[[str], Path], tmp_path: Path):
    run = finished_run(tmp_path, str(tiny_wan("t2v-a14b")), expert=Expert.LOW, flow_shift=1.0)
    found = evaluate(run, Options(steps=8, teacher_steps=8))
    by_expert = found["velocity_error"]["by_expert"]
    assert by_expert["transformer_2"]["relative_l2"] == 0.0, "the student is the low-noise expert"
    assert by_expert["transformer"]["relative_l2"] > 0.01
    # Without a shift eight steps are at 1, 0.857, 0.714, ...: only the first is at or above the boundary of 0.875.
    assert by_expert["transformer"]["states"] == len(PROMPTS)
    assert {row["expert"] for row in found["velocity_error"]["by_t"] if row["t_from"] >= 0.875} == {"transformer"}
    assert {row["expert"] for row in found["velocity_error"]["by_t"] if row["t_to"] <= 0.875} == {"transformer_2"}
    assert found["teacher_parameters"] == 2 * found["teacher_expert_parameters"]


def test_the_target_is_guided_by_each_experts_own_scale(tiny_wan: Callable[[str], Path], tmp_path: Path):
    run = finished_run(
        tmp_path, str(tiny_wan("t2v-a14b")), expert=Expert.LOW, guidance_scale=5.0, guidance_scale_2=1.0, flow_shift=1.0
    )
    unguided = evaluate(run, Options(steps=8, teacher_steps=8))["velocity_error"]["by_expert"]["transformer_2"]
    assert unguided["relative_l2"] == 0.0
    record = json.loads((run / "run.json").read_text())
    record["config"] |= {"guidance_scale": 1.0, "guidance_scale_2": 5.0}
    (run / "run.json").write_text(json.dumps(record))
    guided = evaluate(run, Options(steps=8, teacher_steps=8))["velocity_error"]["by_expert"]["transformer_2"]
    assert guided["relative_l2"] > 1e-4


def perturb(model: WanTransformer3DModel) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        model.proj_out.weight.add_(0.1 * torch.randn_like(model.proj_out.weight))


def test_figures_depend_on_the_seed_and_not_on_the_batches(tiny_wan: Callable[[str], Path], tmp_path: Path):
    run = finished_run(tmp_path, str(tiny_wan("t2v-1.3b")), student=perturb)

    def figures(**options: Any) -> list[float]:
        found = evaluate(run, Options(**options))
        names = ("latent_distance", "latent_distance_unrelated", "pixel_distance", "pixel_distance_unrelated")
        return [found["velocity_error"]["relative_l2"], *(found[name] for name in names)]

    whole = figures(batch_size=5)
    assert figures(batch_size=2) == pytest.approx(whole, rel=1e-4)
    assert figures(batch_size=1) == pytest.approx(whole, rel=1e-4)
    assert figures(batch_size=5, seed=1) != pytest.approx(whole, rel=1e-2)


def test_steps_default_to_the_runs_own(tiny_wan: Callable[[str], Path], tmp_path: Path):
    run = finished_run(tmp_path, str(tiny_wan("t2v-1.3b")), rollout_steps=5, sample_steps=4)
    found = evaluate(run, Options(count=1))
    assert (found["steps"], found["teacher_steps"]) == (4, 5)
    found = evaluate(run, Options(count=1, steps=6))
    assert (found["steps"], found["teacher_steps"]) == (6, 6)


def break_weights(model: WanTransformer3DModel) -> None:
    with torch.no_grad():
        model.proj_out.bias.fill_(torch.nan)


def test_a_student_that_gives_no_numbers_is_told_and_the_figures_stay_json(
    tiny_wan: Callable[[str], Path], tmp_path: Path
):
    run = finished_run(tmp_path, str(tiny_wan("t2v-1.3b")), student=break_weights)
    assert main(["evaluate", str(run)]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads((run / "evaluation.json").read_text(), parse_constant=refuse)
    assert found["latent_distance"] is None and found["velocity_error"]["relative_l2"] is None
    assert any("5 of the 5 pictures of the student hold values that are not finite" in note for note in found["notes"])


def test_prompts_from_the_training_data_are_noted(tiny_wan: Callable[[str], Path], tmp_path: Path):
    run = finished_run(tmp_path, str(tiny_wan("t2v-1.3b")))
    found = evaluate(run, Options(count=2))
    assert found["prompts"] == 2 and found["prompts_in_training_data"] == 2
    assert "--prompts FILE" in found["notes"][0]


@pytest.mark.parametrize(
    ("change", "options", "named"),
    [
        (lambda run: (run / "run.json").unlink(), {}, r"run\.json"),
        (lambda run: (run / "student" / "model_index.json").unlink(), {}, "not exported its student"),
        (lambda run: None, {"steps": 0}, "--steps 0"),
        (lambda run: None, {"teacher_steps": -1}, "--teacher_steps -1"),
        (lambda run: None, {"batch_size": 0}, "--batch_size 0"),
        (lambda run: None, {"count": 0}, "--count 0"),
        (lambda run: None, {"teacher_path": str(embedded_teacher_path())}, "prompt embedding size is 128"),
        (lambda run: None, {"teacher_path": "nowhere/at-all"}, "nowhere/at-all"),
    ],
)
def test_what_cannot_be_compared_is_an_error_that_says_why(
    tiny_wan: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    options: dict[str, Any],
    named: str,
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = finished_run(tmp_path, str(tiny_wan("t2v-1.3b")))
    change(run)
    with pytest.raises(ConfigError, match=named):
        evaluate(run, Options(**options))
    assert not (run / "evaluation.json").exists() and not (run / "evaluation").exists()


def test_a_directory_that_is_no_run_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "holds no run.json" in error and "Traceback" not in error


def test_the_embedded_teacher_and_its_student_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = finished_run(
        tmp_path / "run", "embedded", resolution=(64, 64), data_path="", guidance_scale=3.0, sample_steps=8
    )
    output = tmp_path / "figures" / "out.json"
    assert main(["evaluate", str(run), "--count", "10", "--json", "--output", str(output)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(output.read_text()) == json.loads((run / "evaluation.json").read_text())
    assert printed["schema"] == 1 and printed["prompts_in_training_data"] == 0 and printed["notes"] == []
    assert printed["teacher_accuracy"] >= 0.9
    assert 0 <= printed["student_accuracy"] <= 1
    assert printed["student_parameters"] == printed["teacher_expert_parameters"] == 5_128_192
    assert printed["teacher_parameters"] == 2 * 5_128_192
    assert all(isinstance(printed[f"{name}_parameters"], int) for name in ("teacher", "student"))
    pictures = json.loads((run / "evaluation" / "pictures.json").read_text())["pictures"]
    assert len(pictures) == 10
    right = {name: sum(entry["verdict"][name]["right"] for entry in pictures) / 10 for name in ("teacher", "student")}
    assert right == {"teacher": printed["teacher_accuracy"], "student": printed["student_accuracy"]}
    for entry in pictures:
        assert all(Image.open(run / "evaluation" / entry[name]).size == (64, 64) for name in ("teacher", "student"))
    page = (run / "report.html").read_text()
    assert all(entry["prompt"] in page for entry in pictures) and page.count("<img") == 20


def randomise(model: WanTransformer3DModel) -> None:
    torch.manual_seed(0)
    fresh = WanTransformer3DModel.from_config(model.config)
    model.load_state_dict(fresh.state_dict())


def test_a_student_that_learnt_nothing_draws_nothing_right(tmp_path: Path):
    run = finished_run(tmp_path, "embedded", resolution=(64, 64), data_path="", student=randomise)
    assert evaluate(run, Options(count=10))["student_accuracy"] < 0.2


def test_prompts_that_are_no_captions_are_left_out_of_the_accuracy(tmp_path: Path):
    run = finished_run(tmp_path, "embedded", resolution=(64, 64), data_path="", guidance_scale=3.0)
    prompts = tmp_path / "own.txt"
    prompts.write_text("a small red circle on a white background\na dog\n")
    found = evaluate(run, Options(prompts=prompts, steps=8))
    assert found["teacher_accuracy"] in (0.0, 1.0)
    assert any(note.startswith("1 prompts are no captions") for note in found["notes"])


def test_the_printed_table_names_both_and_the_page(
    tiny_wan: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = finished_run(tmp_path, str(tiny_wan("t2v-a14b")))
    assert main(["evaluate", str(run), "--count", "2"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].split() == ["teacher", "student"]
    assert "velocity error" in text and "folded in" in text and f"{run / 'report.html'}" in text
