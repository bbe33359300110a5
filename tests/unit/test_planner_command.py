"""`wandistill plan` as a person and a program use it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wandistill.catalog import find_model
from wandistill.config import PLACEMENTS, TrainConfig
from wandistill.errors import ConfigError
from wandistill.planner.advice import advise
from wandistill.planner.command import add_arguments, main, request_of, run
from wandistill.planner.placements import AUTO, Placement, find_placement
from wandistill.planner.plan import plan

FOUR_3090 = "--model wan2.2-t2v-a14b --gpu rtx-3090 --gpus 4 --host_memory 256GiB"


def parse(text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(shlex.split(text))


def answer(text: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*shlex.split(text), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def integers(value: Any, path: str = "") -> list[str]:
    """Paths of all byte counts that are not integers."""
    if isinstance(value, dict):
        return [bad for key, inner in value.items() for bad in integers(inner, f"{path}.{key}")]
    if isinstance(value, list):
        return [bad for index, inner in enumerate(value) for bad in integers(inner, f"{path}[{index}]")]
    return [path] if path.endswith("bytes") and value is not None and type(value) is not int else []


def test_every_placement_has_a_row_and_the_choice_its_terms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(f"{FOUR_3090} --student 1b --gradient_checkpointing")) == 0
    out = capsys.readouterr().out
    assert all(f"\n{placement.value} " in out for placement in Placement)
    assert "choice: --teacher_device_strategy stream" in out
    assert "student moments 7.4 GiB" in out and "teacher copy 53.3 GiB" in out and "each node:" in out


def test_where_nothing_fits_it_says_what_is_missing_and_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(f"{FOUR_3090} --student half")) == 0
    out = capsys.readouterr().out
    assert "choice: none" in out and "missing: with" in out and "what would make it fit:" in out
    assert "--student_parallel fsdp" in out and "--optimizer adamw8bit" in out and "--gpus 8" in out


def test_check_makes_nothing_fits_a_2() -> None:
    assert main(shlex.split(f"{FOUR_3090} --student half --check")) == 2
    assert main(shlex.split(f"{FOUR_3090} --student 1b --check")) == 0
    assert main(shlex.split(f"{FOUR_3090} --student half --max batch_size --check")) == 2


def test_json_has_schema_1_and_integer_bytes_that_sum_to_the_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    content = answer(f"{FOUR_3090} --student 1b", capsys)
    assert content["schema"] == 1 and integers(content) == []
    assert [row["placement"] for row in content["placements"]] == [placement.value for placement in Placement]
    for row in content["placements"]:
        for rank in row["ranks"]:
            assert sum(term["bytes"] for term in rank["terms"]) == rank["peak_bytes"]
        if row["ranks"]:
            assert row["host"]["peak_bytes"] > 0 and row["time"]["step_seconds"] > 0
            assert row["fits"] or row["missing_bytes"] > 0


def test_json_tells_the_advice(capsys: pytest.CaptureFixture[str]) -> None:
    content = answer(f"{FOUR_3090} --student half", capsys)
    assert content["choice"] is None and content["advice"]
    assert all(one["flags"].startswith("--") and one["freed_bytes"] >= 0 for one in content["advice"])


def test_explain_gives_each_term_s_formula_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(f"{FOUR_3090} --student 1b --explain")) == 0
    out = capsys.readouterr().out
    assert "997.3 M parameters x 8 B" in out and "3 x 670.3 MiB + outside the blocks" in out
    assert "teacher: compute" in out and "sum" in out


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("--max batch_size", "max batch_size: "),
        ("--max resolution", "max resolution: "),
        ("--min gpus", "min gpus: 1 "),
        ("--min gpu_memory", "min gpu_memory: "),
    ],
)
def test_inverse_questions_have_an_answer(question: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(f"{FOUR_3090} --student 1b --gradient_checkpointing {question}")) == 0
    assert words in capsys.readouterr().out


def test_flags_may_have_hyphens() -> None:
    text = FOUR_3090.replace("_", "-") + " --batch-size 2 --teacher-dtype int8"
    request = request_of(parse(text))
    assert request.batch_size == 2 and request.teacher_dtype == "int8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--model wan2.2-t2v-a15b --gpu rtx-3090 --host_memory 64GiB", "Did you mean wan2.2-t2v-a14b?"),
        ("--model embedded --gpu rtx-3091 --host_memory 64GiB", "Did you mean rtx-3090?"),
        ("--model embedded --gpu rtx-3090", "--host_memory is missing"),
        ("--model embedded --gpu rtx-3090 --host_memory lots", "'lots' is not an amount of memory"),
        ("--model embedded --gpu rtx-3090 --gpus 0 --host_memory 64GiB", "contradict each other"),
        ("--model embedded --host_memory 64GiB --resolution 65x64", "multiple of 16"),
        ("--model embedded --host_memory 64GiB --student 1b", "--student_config 1b"),
        ("--model embedded --host_memory 64GiB --nodes 0", "--nodes 0: must be at least 1"),
        ("--model embedded --host_memory 64GiB --min gpus", "has no GPU"),
        ("--model embedded --host_memory 64GiB --batch_size 0", "--batch_size 0"),
        ("--model embedded --node g5.12xlarg", "Did you mean g5.12xlarge?"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(text)) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and error.count("\n") == 1


def test_a_node_shape_gives_gpu_count_and_memory() -> None:
    machines = request_of(parse("--model embedded --node g5.12xlarge")).machines
    assert machines.gpu is not None and (machines.gpu.name, machines.ranks, machines.cores) == ("a10g", 4, 24)
    assert request_of(parse("--model embedded --node g5.12xlarge --gpus 2")).machines.ranks == 2


def test_without_a_gpu_processes_share_the_node(capsys: pytest.CaptureFixture[str]) -> None:
    content = answer("--model embedded --student half --gpus 2 --host_memory 16GiB", capsys)
    assert content["request"]["gpu"] is None and content["request"]["processes"] == 2
    assert content["choice"] == "gpu" and content["request"]["teacher_dtype"] == "float32"


def test_a_device_map_is_read_for_custom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "map.yaml"
    file.write_text("0-3: 0\n4-7: 1\n")
    text = f"--model embedded --student half --gpu l4 --gpus 2 --host_memory 64GiB --teacher_device_map {file}"
    rows = {row["placement"]: row for row in answer(text, capsys)["placements"]}
    assert rows["custom"]["fits"]


def test_every_advice_parses_as_flags() -> None:
    parser_text = f"{FOUR_3090} --student half"
    for one in advise(plan(request_of(parse(parser_text)))):
        changed = request_of(parse(f"{parser_text} {one.flags}"))
        assert plan(changed).choice is not None


def test_the_defaults_are_those_of_train() -> None:
    request, config = request_of(parse(FOUR_3090)), TrainConfig()
    assert request.optimizer == config.optimizer and request.mixed_precision == config.mixed_precision
    assert request.student_parallel == config.student_parallel and request.guided
    assert request.gradient_accumulation_steps == config.gradient_accumulation_steps


def test_the_placements_of_planner_and_configuration_are_the_same() -> None:
    assert sorted(PLACEMENTS) == sorted([*(placement.value for placement in Placement), AUTO])


def test_an_unknown_placement_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"known are gpu, gpu0, .* Did you mean stream\?"):
        find_placement("steam")


def test_a_local_folder_is_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    import wandistill

    folder = Path(wandistill.__file__).parent / "demo" / "teacher"
    content = answer(f"--model {folder} --student half --resolution 64x64 --host_memory 8GiB", capsys)
    assert content["request"]["teacher_parameters"] == find_model("embedded").parameters


def test_the_acceptance_command_answers_in_half_a_second_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'diffusers')))\n"
        "from wandistill.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "plan", *shlex.split(f"{FOUR_3090} --student 1b")]
    # As after an installation: the modules are compiled.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    subprocess.run(command, check=True, capture_output=True, env=env)
    seconds = []
    for _ in range(8):
        # Its own time, which is all the time there is on an idle machine: other tests run beside this one.
        before = os.times()
        result = subprocess.run(command, capture_output=True, text=True, env=env)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert result.returncode == 0 and "choice: --teacher_device_strategy" in result.stdout
    assert min(seconds) < 0.5


def test_run_prints_nothing_else_than_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(parse(f"{FOUR_3090} --student 1b --json")) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and json.loads(captured.out)["schema"] == 1
