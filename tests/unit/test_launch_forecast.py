"""A run that its GPUs rule out is refused before torch is imported or a rank starts, and no run is that could go on."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any

import fake_nvml
import probes
import pytest
from fake_nvml import card
from launching import termination
from runs import flags
from sparse_wan import build_sparse_a14b

from wandistill.catalog import model_from_folder
from wandistill.config import TrainConfig, from_mapping, with_defaults
from wandistill.errors import DoesNotFit
from wandistill.launch import forecast, records, state
from wandistill.launch.forecast import check_fit, check_job
from wandistill.planner.advice import advise
from wandistill.planner.decide import decide
from wandistill.planner.from_config import request_of_config
from wandistill.planner.measured import RankProbe, measured_machines
from wandistill.student_config import student_spec
from wandistill.units import GIB, MIB

CARD_24 = card(24 * GIB)
CARD_141 = card(141 * GIB)
H200 = "NVIDIA H200"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sparse_a14b(tmp_path_factory.mktemp("a14b"), weights=False)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 GiB of memory, a torch for CUDA, and NVML for the cards that a test names."""
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr("wandistill.planner.decide.advise", lambda answer: [])  # it takes the most time
    monkeypatch.setattr(forecast, "torch_cuda", lambda: (13, 2))
    monkeypatch.setattr(forecast, "_AGAIN_SECONDS", 0)
    for name in ("available_bytes", "whole_bytes"):
        monkeypatch.setattr(forecast, name, lambda: 128 * GIB)
    for name in (*VARIABLES, "FAKE_NVML", records.FOLDER):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(teacher: Path, tmp_path: Path) -> TrainConfig:
    return from_mapping(settings(teacher, tmp_path))


def settings(teacher: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "teacher_path": str(teacher),
        "data_path": "prompts.txt",
        "output_dir": str(tmp_path / "out"),
        "student_config": "1b",
        "teacher_device_strategy": "gpu",
        "gradient_checkpointing": "true",
    }


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts cards into the machine."""
    return lambda *found: monkeypatch.setenv("FAKE_NVML", json.dumps(found))


def refusal(config: TrainConfig, ranks: int = 1) -> str:
    """The sentence; empty: nothing is said."""
    try:
        check_fit(config, ranks, 1)
    except DoesNotFit as error:
        return str(error)
    return ""


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """The environment of a process with one card of 24 GiB, where importing torch fails."""
    site = tmp_path / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("raise SystemError('torch was imported')")
    (site / "torch" / "version.py").write_text("cuda: Optional[str] = '13.2'\n")
    shutil.copy(fake_nvml.__file__, site / "pynvml.py")
    log = tmp_path / "termination-log"
    log.touch()
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    told = {"PYTHONPATH": path, "FAKE_NVML": json.dumps([CARD_24]), "WANDISTILL_TERMINATION_LOG": str(log)}
    return {**os.environ, **told}


@pytest.mark.parametrize("command", [["train"], ["launch", "--nproc", "1", "--"]], ids=["train", "launch"])
def test_a14b_on_a_24_gb_card_ends_with_2_within_10_seconds_and_without_torch(command, teacher, tmp_path, elsewhere):
    asked = settings(teacher, tmp_path)
    del asked["gradient_checkpointing"]
    began = time.monotonic()
    line = [sys.executable, "-m", "wandistill", *command, *flags(asked, "--gradient_checkpointing")]
    done = subprocess.run(line, env=elsewhere, capture_output=True, text=True, timeout=120)
    assert time.monotonic() - began < 10
    assert done.returncode == 2, done.stderr
    assert "--teacher_device_strategy gpu: rank 0's GPU lacks" in done.stderr
    assert "teacher weights, 53.3 GiB. It would fit with" in done.stderr and "torch was imported" not in done.stderr
    assert not (tmp_path / "out" / "launch").exists()
    if command[0] == "launch":
        told = termination(tmp_path)
        assert told["reason"] == "bad_config" and "rank 0's GPU lacks" in told["message"]


def test_a_card_with_room_is_not_refused(config, cards):
    cards({**CARD_141, "name": H200})
    assert not refusal(config)


def test_memory_that_other_processes_hold_is_gone(config, cards):
    cards(card(141 * GIB, 24 * GIB, name=H200))
    assert "24.6 GiB there" in refusal(config)


def test_the_context_of_a_rank_that_was_quicker_changes_nothing(config, cards):
    cards(CARD_24)
    idle = refusal(config)
    cards(card(24 * GIB, 24 * GIB - 500 * MIB))
    assert refusal(config) == idle


def test_advice_is_for_the_memory_that_the_node_has_now(config, cards, monkeypatch):
    cards(CARD_24)
    monkeypatch.setattr("wandistill.planner.decide.advise", advise)
    assert "with --teacher_device_strategy stream" in refusal(config)
    monkeypatch.setattr(forecast, "available_bytes", lambda: 40 * GIB)
    assert "with --teacher_device_strategy disk" in refusal(config)


def test_a_node_s_memory_is_refused_only_if_it_could_not_be_enough_with_nothing_else_in_it(config, cards, monkeypatch):
    streamed = dataclasses.replace(config, teacher_device_strategy="stream")
    cards(CARD_24)
    monkeypatch.setattr(forecast, "available_bytes", lambda: 20 * GIB)
    assert not refusal(streamed)
    monkeypatch.setattr(forecast, "whole_bytes", lambda: 30 * GIB)
    assert "the node's memory lacks" in refusal(streamed) and "20.0 GiB there" in refusal(streamed)


@pytest.mark.parametrize(
    "change",
    [
        {"device": "cpu"},
        {"force": True},
        {"targets": "cached"},
        {"teacher_device_strategy": "custom"},
        {"teacher_device_strategy": "auto", "teacher_device_map": "map.yaml"},
        {"teacher_path": "embedded"},
        {"teacher_path": "someone/else-s"},
        {"teacher_path": "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "teacher_revision": "main"},
        {"teacher_path": str(Path(__file__).parent)},
        {"data_path": ""},  # told by the run
        {"student_config": "none-such"},
        {"resolution": "833x480"},
    ],
    ids=str,
)
def test_nothing_is_said_of_a_run_that_may_go_on_or_ends_for_another_reason(config, cards, change):
    cards(CARD_24)
    assert not refusal(dataclasses.replace(config, **change))


def test_a_teacher_of_the_catalogue_is_judged_before_it_is_fetched(config, cards):
    cards(CARD_24)
    assert refusal(dataclasses.replace(config, teacher_path="Wan-AI/Wan2.2-T2V-A14B-Diffusers")) == refusal(config)


@pytest.mark.parametrize(
    "found",
    [
        [],
        [{**CARD_24, "mig": True}],
        [{**CARD_24, "name": "NVIDIA GeForce GTX 480"}],
    ],
    ids=["no card", "MIG", "not in the catalogue"],
)
def test_nothing_is_said_of_cards_that_are_not_known(config, cards, found):
    cards(*found)
    assert not refusal(config)


def test_nothing_is_said_without_nvml_or_where_torch_would_use_no_gpu(config, cards, monkeypatch):
    assert not refusal(config)  # no driver
    cards(CARD_24)
    monkeypatch.setattr(forecast, "torch_cuda", lambda: None)
    assert not refusal(config)
    monkeypatch.setattr(forecast, "torch_cuda", lambda: (13, 2))
    assert refusal(config)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails
    assert not refusal(config)


def test_nothing_is_said_of_several_nodes_or_of_more_ranks_than_cards(config, cards):
    cards(CARD_24)
    check_fit(config, 1, 2)
    check_fit(config, 2, 1)


def test_nothing_is_said_of_a_run_whose_steps_are_taken(config, cards):
    cards(CARD_24)
    output = Path(config.output_dir)
    (output / "checkpoints" / "step-20").mkdir(parents=True)
    (output / "run.json").write_text(json.dumps({"state": "running", "steps": 40}))
    assert refusal(config)
    (output / "run.json").write_text(json.dumps({"state": "running", "steps": 20}))
    assert not refusal(config)
    shutil.rmtree(output / "checkpoints")
    (output / "run.json").write_text(json.dumps({"state": "finished", "steps": 20}))
    assert not refusal(config)


def test_a_placement_that_was_changed_after_an_out_of_memory_is_left_to_the_run(config, cards):
    cards(CARD_24)
    again = dataclasses.replace(config, on_oom="replan")
    assert refusal(again)
    state.add_replan(Path(config.output_dir), {}, {"teacher_device_strategy": "stream"}, "memory ran out")
    assert not refusal(again)


@pytest.mark.parametrize(
    ("visible", "refused"),
    [
        ("0", True),
        ("1", False),
        (" 1, 0", False),
        ("GPU-0", True),
        ("GPU-1000", False),
        ("", False),
        ("-1", False),
        ("0,0", False),
        ("GPU-", False),  # which of the two?
        ("MIG-0000", False),
    ],
)
def test_the_cards_are_those_that_cuda_sees(config, cards, monkeypatch, visible, refused):
    cards(card(141 * GIB, 24 * GIB, name=H200), {**CARD_141, "name": H200})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert bool(refusal(config)) == refused


def test_unlike_cards_are_told_apart_by_uuid_or_the_order_of_the_bus_alone(config, cards, monkeypatch):
    cards(CARD_24, {**CARD_141, "name": H200})
    assert not refusal(config)  # CUDA counts the fastest first
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0000")
    assert refusal(config)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert refusal(config)


def test_all_ranks_of_a_node_are_refused_with_one_sentence_for_the_card_with_the_least(config, cards, monkeypatch):
    cards({**CARD_141, "name": H200}, card(141 * GIB, 24 * GIB, name=H200))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    told = set()
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(DoesNotFit) as caught:
            check_job(config)
        told.add(str(caught.value))
    assert len(told) == 1
    monkeypatch.setenv("WORLD_SIZE", "4")  # another node
    check_job(config)


def test_a_launcher_s_ranks_and_a_process_with_torch_do_not_ask_again(config, cards, monkeypatch, tmp_path):
    cards(CARD_24)
    with pytest.raises(DoesNotFit):
        check_job(config)
    monkeypatch.setenv(records.FOLDER, str(tmp_path))
    check_job(config)
    monkeypatch.delenv(records.FOLDER)
    monkeypatch.setitem(sys.modules, "torch", fake_nvml)
    check_job(config)


def probe(total: int, taken: int, host: int = 128 * GIB) -> RankProbe:
    """A rank on a card of `total` bytes by NVML, as it is measured; `taken` by another process; `host` of its node."""
    context = 450 * MIB
    usable = total - 300 * MIB  # CUDA does not count all of it
    gpu = probes.card(total=usable, free=min(total - taken, usable) - context, reserved=0, alone=not taken)
    return probes.rank(gpu, host_available=host - GIB, host_own=GIB)


def accepts(config: TrainConfig, ranks: list[RankProbe]) -> bool:
    """Whether a run would go on that has measured so."""
    model = model_from_folder(Path(config.teacher_path))
    student = student_spec(config.student_config, model.architecture)
    resolved = with_defaults(config, student, device="cuda", flow_shift=model.flow_shift)
    return not decide(request_of_config(resolved, model, student, measured_machines(ranks)), force=True).forced


@pytest.mark.parametrize("taken", [0, 4 * GIB], ids=["alone", "shared"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("strategy", ["gpu", "gpu0", "sequential", "sharded", "stream", "auto"])
def test_what_a_run_would_accept_once_it_has_measured_is_never_refused(config, cards, strategy, ranks, taken):
    """On cards from too small to large enough, in steps of the order of what measuring tells apart."""
    config = dataclasses.replace(config, teacher_device_strategy=strategy)

    def accepted(total: int) -> bool:
        return accepts(config, [probe(total, taken)] * ranks)

    sizes = range(8 * GIB, 160 * GIB, 128 * MIB)
    least = sizes[bisect_left(sizes, True, key=accepted)]
    for total in range(least, least + GIB, 128 * MIB):
        cards(*[card(total, total - taken)] * ranks)
        check_fit(config, ranks, 1)
    cards(*[card(least - 5 * GIB, least - 5 * GIB - taken)] * ranks)
    assert refusal(config, ranks)


def test_a_node_whose_memory_a_run_would_accept_is_never_refused(config, cards, monkeypatch):
    config = dataclasses.replace(config, teacher_device_strategy="stream")
    cards(CARD_24)
    sizes = range(40 * GIB, 80 * GIB, 64 * MIB)
    least = sizes[bisect_left(sizes, True, key=lambda host: accepts(config, [probe(24 * GIB, 0, host)]))]
    for name in ("available_bytes", "whole_bytes"):
        monkeypatch.setattr(forecast, name, lambda: least)
    assert not refusal(config)
    monkeypatch.setattr(forecast, "whole_bytes", lambda: least - 2 * GIB)
    monkeypatch.setattr(forecast, "available_bytes", lambda: least - 2 * GIB)
    assert "the node's memory lacks" in refusal(config)


def test_memory_that_is_given_back_a_moment_later_rules_nothing_out(config, cards, monkeypatch):
    cards(card(141 * GIB, 20 * GIB, name=H200))
    assert "lacks" in refusal(config)
    monkeypatch.setattr(forecast.time, "sleep", lambda seconds: cards(card(141 * GIB, name=H200)))
    assert refusal(config) == ""
