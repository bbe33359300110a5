"""Before weights load: what a run measures, what it then decides, and what it leaves of it in run.json."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch
from probes import card
from ranks import Ranks
from runs import SHORT, flags, here
from sparse_wan import build_sparse_a14b

from wandistill.config import from_mapping
from wandistill.demo.captions import training_prompts
from wandistill.errors import ConfigError, ExitCode
from wandistill.planner.measured import RankProbe, operations
from wandistill.planner.outcome import HostUse
from wandistill.planner.work import block_work
from wandistill.train import distributed, measuring, memory, placing, probe, probe_blocks
from wandistill.train.memory import MemoryAccount
from wandistill.train.setup import Setup, resolve, tell_notes
from wandistill.units import GIB

RTX_3090 = card(free=int(23.2 * GIB), reserved=0)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(training_prompts(6)))
    return path


def setup(tmp_path: Path, **settings: object) -> Setup:
    config = from_mapping({**SHORT, "output_dir": str(tmp_path / "out"), "batch_size": 2, **settings})
    return resolve(config, distributed.start(config))


def settle(setup: Setup, **options: bool) -> placing.Settled:
    return placing.settle(setup.config, setup.folder, setup.spec, setup.world, **options)


def test_a14b_on_a_24_gb_card_ends_with_2_before_a_weight_is_read(tmp_path, prompts, monkeypatch, capsys):
    measure = probe.probe_machine
    # A simulated card: this rank is told to have one, and computes its blocks where it is.
    simulated = {"gpu": RTX_3090, "host_available": 128 * GIB, "disk_free": 1000 * GIB}
    monkeypatch.setattr(placing, "probe_machine", lambda *args: dataclasses.replace(measure(*args), **simulated))
    settings = {"teacher_path": build_sparse_a14b(tmp_path / "a14b"), "teacher_device_strategy": "gpu"}
    settings |= {"student_config": "1b", "teacher_dtype": "bfloat16", "gradient_checkpointing": "true"}
    began = time.process_time()
    code = here(["train", *_flags(tmp_path, prompts, settings)])
    assert code == ExitCode.BAD_CONFIG and time.process_time() - began < 10
    said = capsys.readouterr().err
    assert "--teacher_device_strategy gpu: rank 0's GPU lacks" in said and "teacher weights, 53.3 GiB" in said
    assert "It would fit with --teacher_device_strategy stream" in said
    assert not (tmp_path / "out" / "cache").exists()


def test_a_teacher_that_the_container_has_no_memory_for_is_refused_on_a_cpu_too(tmp_path, prompts, monkeypatch, capsys):
    monkeypatch.setattr(probe, "available_bytes", lambda: 20 * GIB)
    settings = {"teacher_path": build_sparse_a14b(tmp_path / "a14b"), "teacher_device_strategy": "stream"}
    assert here(["train", *_flags(tmp_path, prompts, settings | {"student_config": "1b"})]) == ExitCode.BAD_CONFIG
    said = capsys.readouterr().err
    assert "--teacher_device_strategy stream: the node's memory lacks" in said


def test_probing_leaves_the_generators_and_the_run_s_numbers_alone(tmp_path):
    own = setup(tmp_path)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    settled = settle(own)
    assert torch.equal(torch.get_rng_state(), before)
    assert settled.config == dataclasses.replace(own.config, teacher_device_strategy="gpu")


def test_a_probe_of_a_small_cpu_run_is_cheap_and_says_what_it_found(tmp_path):
    settled = settle(setup(tmp_path))
    assert settled.seconds < 5
    (found,) = settled.probes
    assert 0 < found.host_own < found.host_available and found.cores >= 1
    assert 1e-8 < found.operation < 1e-3 and 1e-8 < found.launch < 1e-3
    assert found.core_float32 > 1e8 and found.shm_free <= found.shm and found.disk_free > 0
    (blocks,) = settled.blocks
    assert blocks.teacher is not None and blocks.student is not None and blocks.teacher.seconds > 0
    assert [RankProbe.from_json(entry) for entry in settled.to_json()["probe"]["ranks"]] == [found]


def test_the_teacher_s_block_is_measured_on_the_cores_where_cpu_may_be_its_place(tmp_path):
    of = settle(setup(tmp_path, teacher_device_strategy="cpu")).blocks[0].cores
    assert of is not None and of.run.architecture.num_layers == 1
    assert settle(setup(tmp_path, teacher_device_strategy="gpu")).blocks[0].cores is None


def test_a_cpu_s_second_measurement_is_of_as_many_tokens_as_the_first_lets_expect(tmp_path, monkeypatch):
    own = setup(tmp_path)
    run = dataclasses.replace(settle(own).decision.plan.request.teacher_pass(2, 4), tokens=4096)
    measured = []

    def speed(block, run, half, device):
        measured.append(run)
        return 0.02

    monkeypatch.setattr(probe_blocks, "_block_seconds", speed)
    found = probe_blocks._cpu_block(run, own.folder.transformer_config, torch.bfloat16, torch.device("cpu"))
    few, many = measured
    done = block_work(few)
    assert operations(few) <= 2.5e8 < operations(many) <= 10 * (done.matrix_flops + done.attention_flops)
    assert found.run == many


@pytest.mark.parametrize("settings", [{}, {"mixed_precision": "bf16"}, {"optimizer": "adamw_bf16"}])
@pytest.mark.parametrize("again", [False, True])
def test_the_student_s_block_is_measured_as_it_is_trained_whatever_the_precision(tmp_path, settings, again):
    own = setup(tmp_path)
    run = settle(own).decision.plan.request.change(**settings).student_pass(2)
    config = own.folder.transformer_config
    found = probe_blocks._trained_block(run, config, torch.bfloat16, torch.device("cpu"), again=again)
    assert found.run.architecture.num_layers == 1
    assert found.trained and found.again is again and found.seconds > 0


@pytest.mark.parametrize("settings", [{}, {"mixed_precision": "bf16"}, {"optimizer": "adamw_bf16"}])
def test_what_lies_outside_the_student_s_blocks_is_what_a_student_of_one_block_takes_beyond_it(
    tmp_path, settings, monkeypatch
):
    own = setup(tmp_path)
    run = settle(own).decision.plan.request.change(**settings).student_pass(2)
    config, cpu = own.folder.transformer_config, torch.device("cpu")
    block = probe_blocks._trained_block(run, config, torch.bfloat16, cpu, again=True)
    trained = []
    count = probe_blocks._count_gradients
    monkeypatch.setattr(probe_blocks, "_count_gradients", lambda module: trained.append((module, count(module))))
    assert probe_blocks._student_seconds(block, config, torch.bfloat16, cpu) > 0
    ((student, gradients),) = trained
    assert len(gradients) == len(list(student.parameters())) > len(list(student.transformer.blocks.parameters()))
    monkeypatch.setattr(probe_blocks, "_student_seconds", lambda *args: block.seconds + 0.25)
    assert probe_blocks._outside(block, config, cpu, fp16=False) == pytest.approx(0.25)

    def full(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(probe_blocks, "_student_seconds", full)
    assert probe_blocks._outside(block, config, cpu, fp16=False) is None


@pytest.mark.parametrize(
    ("tokens", "size"), [(900, (1, 60, 60)), (1560, (1, 78, 80)), (97, (1, 2, 194)), (1031, (1, 64, 64))]
)
def test_latents_of_any_number_of_tokens_stay_within_the_rotary_tables(tokens, size):
    assert probe_blocks._latents(tokens, (1, 2, 2)) == size


def test_a_row_of_calls_is_as_long_as_asked_for_and_gives_their_mean():
    calls = []

    def wait() -> None:
        calls.append(0)
        time.sleep(0.002 if len(calls) % 2 else 0.006)

    assert measuring.mean_seconds(wait, torch.device("cpu"), within=0.0) > 0.0059
    assert len(calls) == 2
    calls.clear()
    assert 0.0039 < measuring.mean_seconds(wait, torch.device("cpu"), within=0.1) < 0.006
    assert len(calls) > 2 + 8


def test_preparing_is_planned_without_a_student(tmp_path):
    settled = settle(setup(tmp_path), trains=False)
    assert settled.blocks[0].student is None
    assert set(settled.decision.row.ranks[0].phases) == {"embeddings", "rollouts"}


def test_a_rank_that_was_started_with_other_settings_is_named(tmp_path):
    class Two:
        """A world whose second rank has the same to say as this one."""

        @staticmethod
        def gather(value: list[str]) -> list[list[str]]:
            return [[], value]

    planned = settle(setup(tmp_path)).decision.plan.request
    placing._check(planned, planned, Two())
    with pytest.raises(ConfigError, match="rank 1 was started with other settings than rank 0: batch_size 8 there, 2"):
        placing._check(planned.change(batch_size=8), planned, Two())


def test_a_cpu_that_emulates_bfloat16_says_so_and_advises_float32(tmp_path, monkeypatch, caplog):
    measure = probe.probe_machine
    slow = {"core_float32": 1e11, "core_bfloat16": 1e9, "computes_bfloat16": False}
    monkeypatch.setattr(placing, "probe_machine", lambda *args: dataclasses.replace(measure(*args), **slow))
    settle(setup(tmp_path, teacher_device_strategy="cpu", teacher_dtype="bfloat16"))
    assert "this CPU emulates it (100 times as slow as float32)" in caplog.text
    assert "--teacher_dtype float32 spares that, with 39.1 MiB for the teacher" in caplog.text
    caplog.clear()
    settle(setup(tmp_path, teacher_device_strategy="cpu", teacher_dtype="float32"))
    assert "emulates" not in caplog.text


def test_a_fetch_that_two_ranks_share_is_told_and_recorded(tmp_path, prompts):
    settings = {"max_steps": 2, "teacher_device_strategy": "stream", "stream_fetch": "split"}
    said = Ranks(2, _flags(tmp_path, prompts, settings), tmp_path / "log").finish()
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert "teacher: stream --stream_fetch split --resident_blocks 0 (asked for" in said and "no effect" not in said
    assert run["config"]["stream_fetch"] == run["plan"]["settings"]["stream_fetch"] == "split"


def test_a_shared_fetch_of_one_rank_is_its_own_and_one_of_another_placement_has_no_effect(tmp_path, caplog):
    settled = settle(setup(tmp_path, teacher_device_strategy="stream", stream_fetch="split"))
    assert settled.config.stream_fetch == "own"
    assert "note: --stream_fetch split: there is one rank on a node; it has no effect here." in caplog.text
    tell_notes(setup(tmp_path, teacher_device_strategy="offload", stream_fetch="split"))
    assert "note: --stream_fetch: only stream read it, not offload; it has no effect here." in caplog.text


def test_the_host_s_peak_in_each_phase_is_of_private_and_shared_memory_at_one_time(tmp_path, monkeypatch):
    account = MemoryAccount(distributed.World(0, 1, 0, 1, torch.device("cpu")), None, detailed=False)
    monkeypatch.setattr(memory, "_INTERVAL", 0)

    def look(*seen: HostUse) -> None:
        looks = iter(seen)
        monkeypatch.setattr(memory, "host_memory", lambda: next(looks))
        with pytest.raises(StopIteration):
            account._look()

    look(HostUse(1, 1))
    with account.phase("building"):
        look(HostUse(5, 1), HostUse(1, 4), HostUse(2, 6))
    look(HostUse(4, 2), HostUse(9, 0))  # what is built goes on until the next phase begins
    with account.phase("teacher"):
        look(HostUse(3, 0))
    assert account._host == {"": HostUse(1, 1), "building": HostUse(9, 0), "teacher": HostUse(3, 0)}


def test_a_run_writes_plan_and_memory_side_by_side_and_a_profile_whose_lasting_terms_are_the_plan_s(tmp_path, prompts):
    settings = {"max_steps": 2, "ema_decay": 0.9, "ema_device": "cpu"}
    assert here(["train", *_flags(tmp_path, prompts, settings), "--memory_profile"]) == 0
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["config"]["teacher_device_strategy"] == run["plan"]["placement"] == "gpu"
    assert run["plan"]["why"].startswith("gpu fits") and len(run["plan"]["others"]) == 9
    memory = run["memory"]
    assert memory["gpu"] == [] and memory["host"][0]["measured_bytes"] > 2**28
    assert memory["step_seconds"]["measured"] > 0 and memory["step_seconds"]["predicted"] > 0
    content = json.loads((tmp_path / "out" / "memory_profile.json").read_text())
    terms = {entry["term"]: entry for entry in content["ranks"][0]["terms"]}
    for name in ("student weights", "student moments"):
        assert terms[name]["measured_bytes"] == terms[name]["predicted_bytes"] > 0
    assert "Planned and measured" in (tmp_path / "out" / "report.html").read_text()


def _flags(tmp_path: Path, prompts: Path, settings: dict[str, object]) -> list[str]:
    given = {**SHORT, "data_path": prompts, "output_dir": tmp_path / "out", "batch_size": 2, **settings}
    checkpointing = given.pop("gradient_checkpointing", None)
    return flags(given, *(["--gradient_checkpointing"] if checkpointing else []))
