"""The report of an out-of-memory: text, oom.json and a pod's termination message; and the state of tries."""

from __future__ import annotations

import json
import shlex
import time

import pytest

from wandistill.catalog import find_gpu, find_model
from wandistill.config import from_mapping
from wandistill.launch import report, state
from wandistill.launch.causes import Kind
from wandistill.launch.command import parse_train
from wandistill.launch.memory import RankMemory
from wandistill.launch.question import Question
from wandistill.launch.report import Command, OomReport
from wandistill.planner.request import Machines

GIB = 2**30


@pytest.fixture
def question(monkeypatch: pytest.MonkeyPatch) -> Question:
    """A run of A14B on four RTX 3090; its folder is the catalogue's model."""
    monkeypatch.setattr("wandistill.launch.question.model_from_folder", lambda path: find_model(path.name))
    machines = Machines(gpu=find_gpu("rtx-3090"), ranks=4, nodes=1, host_memory=256 * GIB, cores=32)
    config = from_mapping(
        {
            "teacher_path": "wan2.2-t2v-a14b",
            "student_config": "1b",
            "teacher_device_strategy": "stream",
            "teacher_dtype": "bfloat16",
            "resolution": "832x480",
            "gradient_checkpointing": True,
            "mixed_precision": "bf16",
            "output_dir": "outputs/x",
        }
    )
    return Question(config, "/models/wan2.2-t2v-a14b", machines)


def made(question: Question | None, ranks: int = 4) -> OomReport:
    memory = [
        RankMemory(rank, "student", 9 * GIB, 256 * GIB, 20 * GIB, 23 * GIB, 24 * GIB, GIB // 8) for rank in range(ranks)
    ]
    command = Command(["wandistill", "launch", "--nproc", "4", "--"], ["--output_dir", "outputs/x"], "outputs/x")
    return OomReport(Kind.CUDA, "CUDA out of memory. Tried to allocate 2.00 GiB", 2, command, memory, question)


def test_a_question_is_read_back_as_it_was_written(question):
    again = Question.from_json(json.loads(json.dumps(question.to_json())))
    assert again == question
    assert again.request() == question.request()


def test_the_report_holds_every_rank_the_phase_the_term_the_plan_and_commands_that_parse(question):
    found = made(question).to_json()
    assert (found["schema"], found["kind"], found["rank"], found["phase"]) == (1, "cuda", 2, "student")
    assert [memory["rank"] for memory in found["ranks"]] == [0, 1, 2, 3]
    assert found["term"] == found["plan"]["terms"][0]["term"]
    assert found["plan"]["placement"] == "stream" and found["plan"]["predicted_bytes"] > 0
    assert found["advice"]
    for one in found["advice"]:
        words = shlex.split(one["command"])
        parse_train(words[words.index("--") + 1 :])
        assert one["freed_bytes"] > 0
    text = report.text_of(found)
    assert text.startswith("OUT OF MEMORY (cuda): rank 2, in phase student: CUDA out of memory.")
    assert "rank 3, in phase student: 20.0 GiB allocated, 23.0 GiB reserved, 24.0 GiB total, 128.0 MiB free" in text
    assert all(one["command"] in text for one in found["advice"])


def test_in_a_pod_advice_is_also_a_helm_command(question, monkeypatch):
    assert all("helm" not in one for one in made(question).to_json()["advice"])
    monkeypatch.setenv("WANDISTILL_RELEASE", "my-run")
    monkeypatch.setenv("WANDISTILL_RUN", "my-run-big-cards-0123abcd")
    monkeypatch.setenv("WANDISTILL_POOL", "big-cards")
    found = made(question).to_json()
    text = report.text_of(found)
    for one in found["advice"]:
        assert one["helm"].startswith("helm upgrade my-run helm/wandistill --reuse-values --set ")
        assert f"or, as another job that begins anew: {one['helm']}" in text
    placements = [one["changes"].get("teacher_device_strategy") for one in found["advice"]]
    assert any(f"--set pools.big-cards.placement={placement}" in text for placement in placements if placement)


def test_before_anything_was_planned_the_report_has_what_there_is():
    found = made(None).to_json()
    assert found["plan"] is None and found["advice"] == []
    assert "rank 2, in phase student" in report.text_of(found)


def test_a_report_is_read_back_by_the_try_that_made_it_only(tmp_path):
    found = made(None).to_json()
    report.write(tmp_path, found)
    assert report.read(tmp_path, found["time"] - 1) == found
    assert report.read(tmp_path, found["time"] + 1) is None


def test_a_termination_message_is_one_line_of_less_than_4000_bytes(question, tmp_path, monkeypatch):
    log = tmp_path / "termination-log"
    monkeypatch.setenv(report.TERMINATION_LOG, str(log))
    found = made(question, ranks=64).to_json()
    report.write_termination({"exit_code": 1, **found})
    assert not log.exists(), "where there is no pod there is no such file"
    log.touch()
    report.write_termination({"exit_code": 1, **found})
    text = log.read_text()
    assert len(text.encode()) <= 4000 and text.count("\n") == 1
    content = json.loads(text)
    assert content["exit_code"] == 1 and content["rank"] == 2 and content["kind"] == "cuda"


def test_a_changed_placement_holds_for_the_command_that_it_was_made_for(tmp_path):
    asked = {"teacher_device_strategy": "auto", "batch_size": 8}
    assert state.replanned(tmp_path, asked) == {}
    state.add_replan(tmp_path, asked, {"teacher_device_strategy": "stream"}, "memory")
    state.add_replan(tmp_path, asked, {"teacher_device_strategy": "disk", "batch_size": 4}, "memory")
    assert state.replanned(tmp_path, asked) == {"teacher_device_strategy": "disk", "batch_size": 4}
    assert state.replanned(tmp_path, {**asked, "batch_size": 2}) == {}


def test_the_state_of_a_try_is_read_back_and_a_torn_file_is_none(tmp_path):
    file = state.StateFile(tmp_path, 3)
    assert file.last() is None
    begun = state.Try(2, time.time(), 40, "stream", "teacher", 5 * GIB, [{"rank": 0}])
    file.write(begun)
    assert file.last() == begun
    file.write(begun.end(138, "a peer"))
    assert file.last().code == 138 and file.last().ended is not None
    file.path.write_text("{")
    assert file.last() is None


def test_the_newest_checkpoint_counts_as_progress(tmp_path):
    assert state.newest_step(tmp_path) == 0
    for name in ("step-10", "step-9", ".step-20.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert state.newest_step(tmp_path) == 10
