"""The report: one page without network or script that shows a run, or says what is missing."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import HOSTILE_PROMPT, evaluation, write_png, write_run

from wandistill.errors import ConfigError
from wandistill.evaluate.report import write_report
from wandistill.evaluate.rundir import student_key


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "my run")


class Page(HTMLParser):
    """What a browser would make of a page: elements with their attributes, and the text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def chart(self, name: str) -> bool:
        return any(attributes.get("id") == name for attributes in self.all("svg"))


def page_of(run: Path) -> Page:
    return Page(write_report(run))


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_page_shows_pictures_verdicts_figures_and_curves(run: Path):
    page = page_of(run)
    assert len(page.all("img")) == 2 * 9 + 2 * 4, "nine pairs, and two strips of four"
    for chart in ("loss", "velocity", "time", "memory", "norm"):
        assert page.chart(chart), chart
    assert "half, distilled from embedded" in page.text
    assert "98.4 % of captions wholly right, student" in page.text
    assert page.text.count("✗ relation") == 2 and page.text.count("✓ right") == 16
    assert "2 x 5.13 M" in page.text and "2.75 M (53.7 % of one)" in page.text
    assert not [attributes for attributes in page.all("p") if attributes.get("class") == "note"]


def test_the_page_needs_no_network_and_no_script(run: Path):
    page = page_of(run)
    addresses = [
        value for _, attributes in page.elements for key, value in attributes.items() if key in ("src", "href")
    ]
    assert addresses and all((value or "").startswith("data:") for value in addresses)
    assert not page.all("script") and not page.all("iframe") and "url(" not in page.source
    assert any("default-src 'none'" in (meta.get("content") or "") for meta in page.all("meta"))


def test_hostile_texts_are_shown_as_they_are_and_never_run(tmp_path: Path):
    run = write_run(tmp_path / "<b>run</b>", student_config="<i>s</i>.json", teacher_path='"><script>1</script>')
    change_json(run / "evaluation.json", prompt_source="<script>2</script>", notes=["<img src=x>"])
    for folder in (run / "samples").iterdir():
        (folder / "prompts.txt").write_text(HOSTILE_PROMPT + "\n")
    page = page_of(run)
    assert not page.all("script") and not page.all("i") and not page.all("b")[4:], "four tiles have the only <b>"
    assert all(set(attributes) <= {"class", "alt", "src"} for attributes in page.all("img"))
    assert page.text.count(" ".join(HOSTILE_PROMPT.split())) == 2
    assert '"><script>1</script>' in page.text and "<script>2</script>" in page.text


@pytest.mark.parametrize(
    ("missing", "told", "still_there"),
    [
        ("evaluation.json", "wandistill evaluate", ["loss", "memory"]),
        ("evaluation", "98.4 %", ["loss", "velocity"]),
        ("metrics.jsonl", "metrics.jsonl is missing or empty: wandistill train", ["velocity"]),
        ("run.json", "run.json is missing: wandistill train", ["loss", "velocity"]),
        ("samples", "98.4 %", ["loss", "velocity"]),
    ],
)
def test_what_is_missing_is_said_and_the_rest_is_shown(run: Path, missing: str, told: str, still_there: list[str]):
    path = run / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = page_of(run)
    assert told in page.text
    assert all(page.chart(chart) for chart in still_there)


def test_the_placement_has_its_reason_and_what_was_planned_beside_what_was_measured(run: Path):
    text = page_of(run).text
    assert "gpu: gpu fits, and no placement is faster." in text
    assert "memory of node 0 1.2 GiB 1.0 GiB +25.0 %" in text and "a step 400 ms 500 ms -20.0 %" in text
    assert "A node's memory as planned" in text and "processes 1.0 GiB 80.0 %" in text


def test_a_gpu_s_memory_is_shown_as_torch_and_as_the_driver_count_it(run: Path):
    record = json.loads((run / "run.json").read_text())
    figures = {"predicted_allocated_bytes": 9 * 2**30, "measured_allocated_bytes": 10 * 2**30}
    figures |= {"predicted_process_bytes": 12 * 2**30, "measured_process_bytes": 12 * 2**30}
    context = {"term": "cuda context", "bytes": 2**29, "formula": "", "allocated": False}
    ranks = [{"rank": 3, "peak_bytes": 2**30, "phase": "student", "terms": [context]}]
    change_json(run / "run.json", memory=record["memory"] | {"gpu": [{"rank": 3, **figures}]})
    change_json(run / "run.json", plan=record["plan"] | {"ranks": ranks, "forced": "rank 0's GPU lacks 1 B"})
    text = page_of(run).text
    assert "GPU of rank 3, allocated by torch 9.0 GiB 10.0 GiB -10.0 %" in text
    assert "GPU of rank 3, whole process 12.0 GiB 12.0 GiB +0.0 %" in text
    assert "GPU of rank 3 as planned" in text and "started with --force: rank 0's GPU lacks 1 B." in text


def test_an_empty_directory_gives_a_page_with_the_commands_that_fill_it(tmp_path: Path):
    text = page_of(tmp_path).text
    assert "wandistill train" in text and f"wandistill evaluate {tmp_path}" in text


def test_the_command_to_evaluate_quotes_the_directory(run: Path):
    (run / "evaluation.json").unlink()
    assert f"wandistill evaluate '{run}'" in page_of(run).text


def test_a_missing_directory_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere"):
        write_report(tmp_path / "nowhere")


def test_a_damaged_evaluation_is_an_error_that_names_the_file(run: Path):
    (run / "evaluation.json").write_text('{"schema": 1, ')
    with pytest.raises(ConfigError, match=r"evaluation\.json"):
        write_report(run)


def lines(losses: list[Any]) -> str:
    return "".join(json.dumps({"schema": 1, "step": i, "loss": loss}) + "\n" for i, loss in enumerate(losses, start=1))


@pytest.mark.parametrize(
    ("losses", "told", "drawn"),
    [
        ([1.0, float("nan"), 0.5, float("inf"), None, 0.2], "3 steps without a finite loss are left out", True),
        ([float("nan")] * 3, "No step has a finite loss", False),
        ([0.0, 0.0, 0.0], "From 0 to 0", True),
        ([1.0, 0.0, 1e-9], "From 1 to 1e-9", True),
        ([0.5], "From 0.5 to 0.5", True),
        ([1e-30, 1e30], "logarithmic", True),
        ([10.0, 1.0, 0.01], "logarithmic", True),
        ([1.0, 0.9, 0.8], "From 1 to 0.8.", True),
    ],
)
def test_any_losses_give_a_page(run: Path, losses: list[Any], told: str, drawn: bool):
    (run / "metrics.jsonl").write_text(lines(losses))
    page = page_of(run)
    assert told in page.text
    assert page.chart("loss") == drawn
    for attributes in page.all("path"):
        assert not re.search(r"nan|inf", attributes.get("d") or "", re.IGNORECASE)


def test_a_line_that_a_kill_cut_short_is_left_out(run: Path):
    (run / "metrics.jsonl").write_text(lines([1.0, 0.5, 0.25])[:-20])
    assert "From 1 to 0.5." in page_of(run).text


def test_a_long_run_gives_a_page_no_larger(run: Path):
    (run / "metrics.jsonl").write_text(lines([1 / step for step in range(1, 50_001)]))
    page = page_of(run)
    longest = max(len(attributes.get("d") or "") for attributes in page.all("path"))
    assert longest < 20_000 and "50,000 steps" in page.text


def test_figures_of_another_student_are_told(run: Path, tmp_path: Path):
    weights = run / "student" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights" * 100_000)
    change_json(run / "evaluation.json", student_key=student_key(run / "student"))
    copied = shutil.copytree(run, tmp_path / "copied", copy_function=shutil.copyfile)
    assert "another one than the figures" not in page_of(copied).text, "a copy has new file times and the same student"
    weights.write_bytes(b"weights" * 99_999 + b"trained")
    assert "another one than the figures" in page_of(run).text


def test_a_run_that_goes_on_says_so(run: Path):
    change_json(run / "run.json", state="running")
    assert "The run has not finished" in page_of(run).text


def test_without_a_judge_the_velocity_error_stands_first_and_pictures_have_no_verdict(run: Path):
    found = evaluation()
    for key in ("teacher_accuracy", "student_accuracy", "judge"):
        del found[key]
    (run / "evaluation.json").write_text(json.dumps(found))
    pictures = json.loads((run / "evaluation" / "pictures.json").read_text())["pictures"]
    change_json(run / "evaluation" / "pictures.json", pictures=[{**entry, "verdict": {}} for entry in pictures])
    page = page_of(run)
    assert "8.7 % velocity error, relative L2" in page.text
    assert "wholly right" not in page.text and "✓" not in page.text
    assert len(page.all("img")) == 2 * 9 + 2 * 4


def test_figures_that_are_not_finite_are_dashes(run: Path):
    found = evaluation()
    found["velocity_error"] |= {"relative_l2": None}
    found["velocity_error"]["by_t"] = [row | {"relative_l2": None} for row in found["velocity_error"]["by_t"]]
    (run / "evaluation.json").write_text(json.dumps(found | {"latent_distance": None, "pixel_distance": None}))
    page = page_of(run)
    assert "velocity error, relative L2 –" in page.text and not page.chart("velocity")


def test_a_teacher_with_one_expert_has_no_word_of_experts(run: Path):
    found = evaluation() | {"boundary": None, "teacher_parameters": 5128192}
    found["velocity_error"]["by_t"] = [row | {"expert": "transformer"} for row in found["velocity_error"]["by_t"]]
    (run / "evaluation.json").write_text(json.dumps(found))
    record = json.loads((run / "run.json").read_text())
    change_json(run / "run.json", teacher=record["teacher"] | {"experts": ["transformer"], "parameters": 5128192})
    text = page_of(run).text
    assert "5.13 M parameters. The student" in text and "53.7 % of the teacher's parameters" in text
    assert "one expert" not in text and "noise expert" not in text


def test_a_pair_whose_picture_is_gone_is_left_out(run: Path):
    (run / "evaluation" / "student-002.png").unlink()
    page = page_of(run)
    assert len(page.all("img")) == 2 * 8 + 2 * 4 and "blue square 2" not in page.text


def test_a_picture_outside_the_run_is_never_shown(run: Path):
    write_png(run / "secret.png", (0, 0, 0))
    pictures = json.loads((run / "evaluation" / "pictures.json").read_text())["pictures"]
    change_json(run / "evaluation" / "pictures.json", pictures=[{**pictures[0], "teacher": "../secret.png"}])
    assert len(page_of(run).all("img")) == 2 * 4


def test_strips_show_six_steps_of_many_with_both_ends(run: Path):
    for step in range(10, 200, 10):
        write_png(run / "samples" / f"step-{step}" / "00.png", (9, 9, 9))
    text = page_of(run).text
    steps = re.findall(r"step (\d+)", text[text.index("pictures changed") :])
    assert steps[:6] == sorted(steps[:6], key=int) and (steps[0], steps[5]) == ("10", "300")


def test_samples_kept_elsewhere_are_found(run: Path, tmp_path: Path):
    shutil.move(run / "samples", tmp_path / "elsewhere")
    record = json.loads((run / "run.json").read_text())
    change_json(run / "run.json", config=record["config"] | {"sample_dir": str(tmp_path / "elsewhere")})
    assert "pictures changed" in page_of(run).text


def test_settings_that_differ_from_the_defaults_stand_out(tmp_path: Path):
    page = page_of(write_run(tmp_path / "run", lr=0.0015))
    assert '<th>lr</th><td class="changed">0.0015</td>' in page.source
    assert "<th>rollout_steps</th><td>8</td>" in page.source


def test_large_pictures_are_not_scaled_up_pixel_by_pixel(run: Path):
    for file in (run / "evaluation").glob("*.png"):
        write_png(file, (1, 2, 3), size=160)
    classes = [attributes.get("class") for attributes in page_of(run).all("img")]
    assert classes == [None] * 18 + ["small"] * 8
