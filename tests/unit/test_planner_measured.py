"""Plans from what a run measured: a simulated machine takes the place of a probe."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from probes import card, rank
from sparse_wan import build_sparse_a14b

from wandistill.catalog import find_gpu, find_model, model_from_folder
from wandistill.config import from_mapping
from wandistill.errors import ConfigError, DoesNotFit
from wandistill.planner.activations import Pass
from wandistill.planner.decide import decide, paragraph
from wandistill.planner.from_config import request_of_config
from wandistill.planner.measured import (
    BlockProbe,
    BlockProbes,
    RankProbe,
    block_to_measure,
    measured_machines,
    measured_rates,
    operations,
)
from wandistill.planner.memory import NCCL_COMMUNICATOR
from wandistill.planner.outcome import HostUse, RankUse, profile, side_by_side
from wandistill.planner.placements import Placement
from wandistill.planner.plan import plan
from wandistill.planner.rates import catalogue_rates
from wandistill.planner.request import Machines, PlanRequest
from wandistill.planner.tape import Compute
from wandistill.planner.timing import training_seconds
from wandistill.planner.work import block_work
from wandistill.student_config import student_spec
from wandistill.units import GIB, MIB

A14B = find_model("wan2.2-t2v-a14b")


def ask(probes: list[RankProbe], model: Any = A14B, **settings: Any) -> PlanRequest:
    config = from_mapping({"student_config": "1b", "resolution": "832x480", "teacher_dtype": "bfloat16", **settings})
    spec = student_spec(config.student_config, model.architecture)
    return request_of_config(config, model, spec, measured_machines(probes))


def test_gpu_for_a14b_on_a_24_gb_card_is_refused_with_the_term_that_lacks_and_what_would_fit(tmp_path: Path) -> None:
    model = model_from_folder(build_sparse_a14b(tmp_path, weights=False))
    request = ask([rank(card())], model, teacher_device_strategy="gpu")
    with pytest.raises(DoesNotFit) as caught:
        decide(request)
    said = str(caught.value)
    assert caught.value.exit_code == 2
    assert said.startswith("--teacher_device_strategy gpu: rank 0's GPU lacks ")
    assert "the largest term is teacher weights, 53.3 GiB" in said
    assert "It would fit with --teacher_device_strategy " in said and "--force starts it all the same" in said


def test_force_goes_on_with_what_was_asked_for() -> None:
    request = ask([rank(card())], teacher_device_strategy="gpu")
    forced = decide(request, force=True)
    assert forced.strategy == "gpu" and "lacks" in forced.forced
    assert "started all the same, since --force was given" in paragraph(forced)


def test_forced_auto_takes_what_lacks_least() -> None:
    request = ask([rank(card())], student_config="half")
    with pytest.raises(DoesNotFit) as caught:
        decide(request)
    assert "the nearest is cpu: rank 0's GPU lacks" in str(caught.value)
    assert "--student_config " in str(caught.value) or "--optimizer " in str(caught.value)
    assert decide(request, force=True).strategy == "cpu"


def test_auto_says_why_and_what_was_against_the_faster_ones() -> None:
    decision = decide(ask([rank(card())], gradient_checkpointing=True))
    assert decision.strategy == "stream"
    said = paragraph(decision)
    assert said.startswith("teacher: stream --stream_fetch own --resident_blocks ")
    assert "on each GPU at most" in said and "a step" in said and "Not gpu: rank 0's GPU lacks" in said


@pytest.mark.parametrize(("reached", "fetch"), [(True, "split"), (False, "own")])
def test_ranks_share_the_fetch_only_where_the_probe_saw_that_their_gpus_reach_each_other(
    reached: bool, fetch: str
) -> None:
    h100 = card(name="NVIDIA H100 80GB HBM3", capability=(9, 0), total=79 * GIB, free=78 * GIB, peer_access=reached)
    request = ask([rank(h100)] * 2, teacher_device_strategy="stream", guidance_scale=1.0, resident_blocks=0)
    assert plan(request).row(Placement.STREAM).settings["stream_fetch"] == fetch


def test_a_placement_for_several_ranks_is_judged_as_gpu_where_there_is_one() -> None:
    decision = decide(ask([rank(card(total=180 * GIB, free=179 * GIB))], teacher_device_strategy="sharded"))
    assert decision.strategy == "sharded" and decision.row.placement is Placement.GPU


def test_the_settings_of_a_plan_come_with_it() -> None:
    probes = [rank(card(total=40 * GIB, free=39 * GIB), host_available=500 * GIB) for _ in range(4)]
    decision = decide(ask(probes, teacher_device_strategy="sequential", gradient_checkpointing=True))
    assert int(decision.settings["max_memory"]) > 10 * GIB


def test_a_gpu_of_the_catalogue_is_known_by_the_name_that_cuda_gives_it() -> None:
    assert measured_machines([rank(card())]).gpu == find_gpu("rtx-3090")


def test_an_unknown_gpu_is_planned_from_the_probe_alone() -> None:
    probes = [rank(card(name="NVIDIA Thing 9000", peer_access=True, peer_link=100e9), node=0) for _ in range(2)]
    machines = measured_machines(probes)
    assert machines.gpu is not None and machines.gpu.peer_kind == "pcie"
    rates = measured_rates(ask(probes), probes, [])
    assert (rates.half, rates.float32, rates.host_link, rates.peer_link) == (60e12, 30e12, 25e9, 100e9)
    decision = decide(ask(probes, gradient_checkpointing=True), rates)
    assert decision.row.time is not None and decision.strategy == "stream"


def test_memory_that_other_processes_hold_is_not_there() -> None:
    shared = card(alone=False, free=13 * GIB, reserved=0)
    machines = measured_machines([rank(card()), rank(shared)])
    assert machines.context is None
    assert 13 * GIB < machines.device_memory < 14.5 * GIB


def test_the_context_is_what_the_gpu_holds_beside_torch() -> None:
    machines = measured_machines([rank(card())])
    assert machines.context == card().total - card().free - card().reserved
    peak = {
        term.name: term.size for term in decide(ask([rank(card())], gradient_checkpointing=True)).row.ranks[0].terms
    }
    assert peak["cuda context"] == machines.context and "nccl buffers" not in peak
    # Of several ranks the job's communicator is in it; that of a placement comes later.
    settings = {"gradient_checkpointing": True, "student_config": "1b"}
    rows = decide(ask([rank(card(total=80 * GIB, free=79 * GIB))] * 2, **settings)).plan
    later = {
        placement: sum(term.size for term in rows.row(placement).ranks[0].terms if term.name == "nccl buffers")
        for placement in (Placement.STREAM, Placement.SHARDED)
    }
    assert later == {Placement.STREAM: 0, Placement.SHARDED: NCCL_COMMUNICATOR}


def test_a_resident_teacher_passes_the_host_s_memory_tensor_by_tensor() -> None:
    planned = decide(ask([rank(card(total=180 * GIB, free=179 * GIB))])).row
    assert planned.placement is Placement.GPU and planned.node is not None
    loading = {term.name: term.size for term in planned.node.host.phases["loading"]}
    assert loading["tensor as loaded"] == 4 * 5120 * 6 * 5120


def test_the_rank_and_the_node_with_the_least_count() -> None:
    probes = [
        rank(card(), node=0),
        rank(card(host_link=12e9), node=0),
        rank(card(), node=1, host_available=60 * GIB, disk_rate=None),
        rank(card(), node=1, host_available=60 * GIB, disk_free=5 * 10**9),
    ]
    machines = measured_machines(probes)
    assert (machines.nodes, machines.ranks, machines.world) == (2, 2, 4)
    assert machines.host_memory == 61 * GIB and machines.disk == 5 * 10**9
    assert measured_rates(ask(probes), probes, []).host_link == 12e9


def test_steps_are_as_slow_as_the_slowest_rank_s_blocks() -> None:
    probes = [rank(), rank()]
    request = ask(probes, teacher_dtype="float32")
    rates = measured_rates(request, probes, [])
    run = block_to_measure(request.teacher_pass(2, 4), work=1e9, weights=GIB)
    one = BlockProbe(run, 1.0)
    seconds = 1.0 / one.scale(rates)  # that the speeds give
    blocks = [BlockProbes(BlockProbe(run, 2 * seconds)), BlockProbes(BlockProbe(run, 3 * seconds))]
    slower = measured_rates(request, probes, blocks)
    assert slower.teacher == pytest.approx(3.0) and slower.student == 1.0
    before, after = (decide(request, given).row.time for given in (rates, slower))
    assert before is not None and after is not None
    assert after.teacher == pytest.approx(3 * before.teacher, rel=1e-2) and after.student == before.student


@pytest.mark.parametrize("placement", ["gpu", "stream", "offload"])
def test_turning_stored_blocks_back_takes_what_was_measured_once_a_pass(placement: str) -> None:
    probes = [rank(card(total=180 * GIB, free=179 * GIB))]
    request = ask(probes, teacher_dtype="int8", teacher_device_strategy=placement, gradient_accumulation_steps=2)

    def teacher_seconds(*blocks: BlockProbes) -> float:
        time = decide(request, measured_rates(request, probes, blocks)).row.time
        assert time is not None
        return time.teacher

    slower = teacher_seconds(BlockProbes(widening=0.3)) - teacher_seconds(BlockProbes(widening=0.2))
    assert slower == pytest.approx(40 * 0.1)


@pytest.mark.parametrize(("kernels", "width"), [(True, 2), (False, 4)])
def test_cpu_takes_as_long_as_blocks_on_the_cores_whatever_a_matrix_alone_took(kernels: bool, width: int) -> None:
    one = rank(card(), core_float32=4e11, core_bfloat16=2e10, computes_bfloat16=kernels)
    request = ask([one], teacher_device_strategy="cpu")
    run = block_to_measure(request.teacher_pass(request.teacher_rows, width), work=math.inf, weights=4 * GIB)
    rates = measured_rates(request, [one], [BlockProbes(cores=BlockProbe(run, 0.5))])
    row = plan(request, rates).row(Placement.CPU)
    assert row.time is not None and row.node is not None
    # 40 blocks; what lies outside them, and where float32 computes also widening, takes the rest.
    assert 20 < row.time.teacher < 22
    terms = {term.name for term in row.node.host.phases["training"] if term.size}
    assert ("teacher wide block" in terms) == (not kernels)


def test_a_block_to_measure_is_small_enough_and_no_smaller_than_it_must() -> None:
    run = Pass(A14B.architecture, 8, 16_384, 512, Compute(2))
    on_gpu = block_to_measure(run, work=4e13, weights=4 * GIB)
    assert on_gpu.architecture.hidden_size == 5120 and on_gpu.tokens == 16_384 and 1 <= on_gpu.batch < 8
    on_cpu = block_to_measure(dataclasses.replace(run, compute=Compute(4)), work=2.5e8, weights=4 * MIB)
    assert 4 * on_cpu.architecture.block_parameters <= 4 * MIB and on_cpu.architecture.num_layers == 1
    assert operations(on_cpu) <= 2.5e8
    fewer = dataclasses.replace(on_cpu, prompt=256)
    assert operations(fewer) < operations(on_cpu), "attention to the prompt counts, its keys and values do not"
    small = Pass(find_model("embedded").architecture, 2, 16, 16, Compute(4))
    assert block_to_measure(small, work=2.5e8, weights=4 * MIB).batch == 2


def test_a_cpu_that_emulates_bfloat16_is_told_from_one_that_computes_it() -> None:
    assert rank().slow_bfloat16 is None
    assert rank(core_bfloat16=4e9, computes_bfloat16=True).slow_bfloat16 is None
    assert rank(core_bfloat16=4e9).slow_bfloat16 == pytest.approx(100)


def test_a_plan_is_made_again_from_the_json_of_its_probes() -> None:
    probes = [rank(card(), operation=5e-6, launch=9e-6), rank()]
    run = Pass(A14B.architecture, 2, 1560, 512, Compute(2))
    blocks = [
        BlockProbes(BlockProbe(run, 0.01)),
        BlockProbes(None, BlockProbe(run, 0.02), BlockProbe(run, 1.0), 0.003, 0.1),
    ]
    for kind, values in ((RankProbe, probes), (BlockProbes, blocks)):
        assert [kind.from_json(json.loads(json.dumps(value.to_json()))) for value in values] == values


def test_filling_the_caches_needs_no_student() -> None:
    probes = [rank(card())]
    request = ask(probes, student_config="half")
    with pytest.raises(DoesNotFit):
        decide(request)
    decision = decide(request.change(trains=False))
    assert decision.strategy == "stream"
    assert set(decision.row.ranks[0].phases) == {"embeddings", "rollouts"}
    assert decision.row.node is not None and decision.row.node.disk == 0


def test_cached_targets_leave_no_teacher_beside_the_student() -> None:
    request = ask([rank(card(total=180 * GIB, free=179 * GIB))])
    cached = decide(request.change(targets="cached")).row
    assert cached.time is not None and cached.time.teacher == 0
    names = {term.name for term in cached.ranks[0].phases["student"]}
    assert "student weights" in names and not any("teacher weights" in name for name in names)
    assert any(term.name == "teacher weights" for term in cached.ranks[0].phases["rollouts"])


def test_a_device_map_is_read_only_for_those_who_take_it(tmp_path: Path) -> None:
    missing = str(tmp_path / "map.json")
    assert ask([rank(card())], teacher_device_strategy="stream", teacher_device_map=missing).device_map is None
    with pytest.raises(ConfigError):
        ask([rank(card())], teacher_device_strategy="custom", teacher_device_map=missing)


def test_the_disk_holds_the_checkpoints_that_are_kept_and_the_one_being_written_or_all_of_a_short_run() -> None:
    def disk(**settings: int) -> float:
        node = decide(ask([rank(card())], gradient_checkpointing=True, **settings)).row.node
        assert node is not None
        return node.disk

    one = disk(max_steps=5, checkpoint_interval=5)
    assert one > 11e9 and disk(max_steps=10, checkpoint_interval=5) == 2 * one
    assert disk(max_steps=1000, checkpoint_interval=5) == 3 * one and disk(keep_checkpoints=4) == 5 * one


def test_plan_and_measurement_stand_side_by_side_for_every_rank_and_node() -> None:
    probes = [rank(card(), node=node) for node in (0, 0, 1, 1)]
    decision = decide(ask(probes, gradient_checkpointing=True))
    uses = [
        RankUse(
            rank,
            rank // 2,
            10 * GIB,
            11 * GIB,
            # One rank of a node builds the student, and later they write a checkpoint together.
            {"building": HostUse((1 if rank % 2 else 6) * GIB, 53 * GIB), "optimizer": HostUse(3 * GIB, 53 * GIB)},
            {"student": 9},
            {"student weights": 5},
        )
        for rank in range(4)
    ]
    content = side_by_side(decision, uses, 1.5)
    assert [entry["rank"] for entry in content["gpu"]] == [0, 1, 2, 3]
    assert content["gpu"][3]["predicted_allocated_bytes"] == decision.row.ranks[1].peak_allocated
    assert [entry["measured_bytes"] for entry in content["host"]] == [60 * GIB, 60 * GIB]
    assert content["step_seconds"]["measured"] == 1.5 and content["step_seconds"]["predicted"] > 0
    table = profile(decision, uses)["ranks"][0]
    phases = {entry["phase"]: entry for entry in table["phases"]}
    assert set(phases) == {"caches", "teacher", "student", "optimizer", "samples"}
    assert phases["student"]["measured_bytes"] == 9 and phases["teacher"]["measured_bytes"] is None
    assert {"term": "student weights", "measured_bytes": 5}.items() <= {
        key: value for entry in table["terms"] if entry["term"] == "student weights" for key, value in entry.items()
    }.items()


def test_without_a_gpu_only_the_node_is_measured() -> None:
    decision = decide(ask([rank()], find_model("embedded"), student_config="half", resolution="64x64"))
    content = side_by_side(decision, [RankUse(0, 0, 0, 0, {"building": HostUse(GIB, 0)})], None)
    assert content["gpu"] == [] and content["host"][0]["measured_bytes"] == GIB
    assert content["placement"] == "gpu"


def test_a_container_s_limit_counts_not_the_machine_s_memory() -> None:
    machines = measured_machines([rank(host_available=7 * GIB, host_own=GIB)])
    assert isinstance(machines, Machines) and machines.host_memory == 8 * GIB


@pytest.mark.parametrize("again", [False, True])
def test_a_block_that_was_trained_tells_how_much_slower_than_its_arithmetic_training_is(again: bool) -> None:
    request = ask([rank(card())], gradient_checkpointing=again)
    rates = catalogue_rates(request.machines)
    run = request.student_pass(1)
    block = dataclasses.replace(run, architecture=dataclasses.replace(run.architecture, num_layers=1))
    expected = training_seconds(block_work(block), block.compute.hidden, rates, again=again)
    probe = BlockProbe(block, 3 * expected, trained=True, again=again)
    assert BlockProbe.from_json(json.loads(json.dumps(probe.to_json()))) == probe
    assert probe.scale(rates) == pytest.approx(3)


def test_what_was_measured_outside_the_blocks_and_of_the_host_is_the_slowest_rank_s_and_missing_in_older_probes() -> (
    None
):
    probes = [rank(card(), operation=2e-6, launch=5e-6), rank(card(), operation=3e-6, launch=4e-6)]
    request = ask(probes, gradient_checkpointing=True)
    run = request.student_pass(request.batch_size)
    block = BlockProbe(dataclasses.replace(run, architecture=dataclasses.replace(run.architecture, num_layers=1)), 0.01)
    block = dataclasses.replace(block, trained=True, again=True)
    rates = measured_rates(request, probes, [BlockProbes(student=block, outside=0.03), BlockProbes(student=block)])
    assert (rates.operation, rates.launch) == (3e-6, 5e-6)
    time = plan(request, rates).row(Placement.GPU).time
    assert time is not None and time.student == pytest.approx(run.architecture.num_layers * 0.01 + 0.03)

    def older(content: dict[str, Any], *names: str) -> dict[str, Any]:
        return {name: value for name, value in content.items() if name not in names}

    machine = RankProbe.from_json(older(probes[0].to_json(), "operation", "launch"))
    blocks = BlockProbes.from_json(older(BlockProbes(student=block, outside=0.03).to_json(), "outside_seconds"))
    former = measured_rates(request, [machine], [blocks])
    assert former.outside is None and former.launch == catalogue_rates(request.machines).launch
