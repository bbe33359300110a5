"""Step times: near what was measured, and in the order that the placements must have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from wandistill.architecture import WanArchitecture
from wandistill.catalog import find_gpu, find_model
from wandistill.planner.activations import Pass
from wandistill.planner.parameters import block_tensors, outer_tensors
from wandistill.planner.placements import Placement
from wandistill.planner.plan import Plan, plan
from wandistill.planner.rates import catalogue_rates
from wandistill.planner.request import Machines, PlanRequest
from wandistill.planner.tape import Compute
from wandistill.planner.teacher_memory import records
from wandistill.planner.timing import forward_seconds, prepare_cost, step_time
from wandistill.planner.updates import HOST_WORK, JOINED, updates
from wandistill.planner.work import forward_work
from wandistill.student_config import student_spec
from wandistill.units import GIB

WAN_14B = WanArchitecture()


def ask(gpu: str, ranks: int, batch: int = 1, **settings: Any) -> PlanRequest:
    teacher = find_model("wan2.2-t2v-a14b")
    machines = Machines(find_gpu(gpu), ranks, 1, 1024 * GIB, cores=16)
    spec = student_spec("1b", teacher.architecture)
    settings = {"resident_blocks": 0, **settings}
    return PlanRequest(teacher, spec.architecture, "1b", machines, 832, 480, batch_size=batch, **settings)


def teacher_seconds(answer: Plan, placement: Placement) -> float:
    time = answer.row(placement).time
    assert time is not None
    return time.teacher


# Resident forwards of a 14B-shaped expert in bfloat16, milliseconds (torch 2.11, one machine of each card).
MEASURED = [
    ("h100-80gb", 1, 1560, 97.0),
    ("h100-80gb", 8, 1560, 749.0),
    ("h100-80gb", 4, 4096, 1022.0),
    ("h200-141gb", 1, 1560, 93.7),
    ("h200-141gb", 2, 1560, 185.5),
    ("h200-141gb", 8, 1560, 737.9),
]


@pytest.mark.parametrize(("gpu", "batch", "tokens", "measured"), MEASURED)
def test_a_forward_takes_what_was_measured_within_15_percent(
    gpu: str, batch: int, tokens: int, measured: float
) -> None:
    rates = catalogue_rates(Machines(find_gpu(gpu), 1, 1, 128 * GIB, 16))
    run = Pass(WAN_14B, batch, tokens, 512, Compute(2))
    assert 1e3 * forward_seconds(run, rates) == pytest.approx(measured, rel=0.15)


def test_a_forward_s_products_are_twice_the_parameters_that_each_token_meets() -> None:
    work = forward_work(Pass(WAN_14B, 1, 4096, 512, Compute(2)))
    # Keys and values of the cross-attention meet the prompt's 512 tokens alone.
    prompt_side = 40 * 2 * 5120 * 5120
    assert work.matrix_flops == pytest.approx(2 * 4096 * (14.05e9 - prompt_side) + 2 * 512 * prompt_side, rel=0.02)


@pytest.mark.parametrize(
    ("placement", "batch", "ranks", "measured"),
    [
        # Ratio to resident on H100: a prototype with three slots, alone and beside another rank.
        (Placement.STREAM, 1, 1, 0.188),
        (Placement.STREAM, 8, 1, 0.976),
        (Placement.STREAM, 8, 2, 0.980),
    ],
)
def test_streaming_costs_what_was_measured(placement: Placement, batch: int, ranks: int, measured: float) -> None:
    answer = plan(ask("h100-80gb", ranks, batch, guided=False))
    ratio = teacher_seconds(answer, Placement.GPU) / teacher_seconds(answer, placement)
    assert ratio == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("batch", "measured"), [(1, 0.873), (2, 0.916), (8, 0.961)])
def test_sharding_costs_what_was_measured_on_two_h200(batch: int, measured: float) -> None:
    answer = plan(ask("h200-141gb", 2, batch, guided=False))
    ratio = teacher_seconds(answer, Placement.GPU) / teacher_seconds(answer, Placement.SHARDED)
    assert ratio == pytest.approx(measured, rel=0.1)


def test_two_ranks_split_the_fetch_where_the_link_is_the_bound() -> None:
    answer = plan(ask("h100-80gb", 2, 1, guided=False))
    alone = plan(ask("h100-80gb", 1, 1, guided=False))
    # Measured: 0.327 s with one stream for copies and gathers, 0.265 s with two; alone 0.516 s.
    assert teacher_seconds(alone, Placement.STREAM) == pytest.approx(0.516, rel=0.05)
    assert teacher_seconds(answer, Placement.STREAM) == pytest.approx(0.265, rel=0.1)


@pytest.mark.parametrize(
    ("gpu", "ranks", "settings", "fetch"),
    [
        ("h100-80gb", 2, {}, "split"),
        ("h100-80gb", 2, {"batch": 8}, "own"),  # compute hides the link
        ("h100-80gb", 2, {"batch": 8, "stream_fetch": "split"}, "split"),
        ("h100-80gb", 2, {"gradient_accumulation_steps": 8}, "own"),  # all micro-batches pass a block while it is there
        ("h100-80gb", 2, {"resident_blocks": 40}, "own"),  # nothing is fetched
        ("h100-80gb", 2, {"stream_fetch": "own"}, "own"),
        ("h100-80gb", 1, {"stream_fetch": "split"}, "own"),  # there is nobody to share with
        ("h100-80gb", 2, {"share_dir": True, "stream_fetch": "split"}, "own"),  # the copy cannot be pinned
        ("rtx-4090", 2, {}, "own"),  # the GPUs reach each other through the host
        ("rtx-4090", 2, {"stream_fetch": "split"}, "split"),
        ("a6000", 2, {}, "own"),  # over PCIe the parts come in through the same port
    ],
)
def test_the_fetch_is_shared_where_the_link_is_the_bound_and_peers_are_nearer(
    gpu: str, ranks: int, settings: dict[str, Any], fetch: str
) -> None:
    row = plan(ask(gpu, ranks, guided=False, **settings)).row(Placement.STREAM)
    assert row.settings["stream_fetch"] == fetch
    assert row.time is not None and ("the rest from peers" in row.time.formulas[0]) == (fetch == "split")


def test_a_split_fetch_is_bound_by_the_slower_of_the_links_from_host_and_peers() -> None:
    request = ask("h100-80gb", 4, guided=False, stream_fetch="split")
    rates = catalogue_rates(request.machines)
    size = records(request, Placement.STREAM).block * 40
    for host, peer, floor in ((50e9, 400e9, size / 4 / 50e9), (50e9, 20e9, size * 3 / 4 / 20e9)):
        row = plan(request, replace(rates, host_link=host, peer_link=peer)).row(Placement.STREAM)
        assert row.time is not None and row.time.teacher == pytest.approx(floor, rel=0.03)


def test_measured_links_decide_about_the_fetch_and_the_caches_are_told_with_it() -> None:
    request = ask("a6000", 4, guided=False)
    # Four cards behind one switch: all at once get a quarter of the port from the host, and all of it from each other.
    shared = replace(catalogue_rates(request.machines), host_link=6e9, peer_link=25e9)
    row = plan(request, shared).row(Placement.STREAM)
    assert row.settings["stream_fetch"] == "split"
    own, split = (
        prepare_cost(asked, Placement.STREAM, None, prompts=8, rollout_steps=8, rates=shared).latent_seconds
        for asked in (request.change(stream_fetch="own"), row.settled(request))
    )
    assert split < own


@pytest.mark.parametrize("gpu", ["rtx-3090", "a100-80gb", "h100-80gb"])
@pytest.mark.parametrize("batch", [1, 8])
def test_no_placement_computes_faster_than_gpu_and_offload_not_faster_than_stream(gpu: str, batch: int) -> None:
    answer = plan(ask(gpu, 4, batch))
    seconds = {row.placement: row.time.teacher for row in answer.rows if row.time}
    assert seconds[Placement.GPU] == min(seconds.values())
    assert seconds[Placement.OFFLOAD] >= seconds[Placement.STREAM] >= seconds[Placement.GPU]
    assert seconds[Placement.CPU] == max(seconds.values())


def test_gpu0_computes_for_all_and_balanced_has_its_bubble() -> None:
    answer = plan(ask("a100-80gb", 4, teacher_rank_trains="yes"))
    gpu = teacher_seconds(answer, Placement.GPU)
    assert teacher_seconds(answer, Placement.GPU0) == pytest.approx(4 * gpu)
    assert gpu < teacher_seconds(answer, Placement.BALANCED) < 2 * gpu


@pytest.mark.parametrize(("student", "hidden"), [("1b", False), ("half", True)])
def test_a_pipeline_s_first_batch_finds_its_way_through_while_the_student_trains(student: str, hidden: bool) -> None:
    request = ask("h200-141gb", 2, 4, optimizer="adamw8bit")
    answer = plan(request.change(student=student_spec(student, request.model.architecture).architecture))
    time, compute = answer.row(Placement.BALANCED).time, teacher_seconds(answer, Placement.GPU)
    assert time is not None and time.teacher == pytest.approx(1.5 * compute)
    assert (time.step > time.teacher) is hidden
    assert time.step == pytest.approx(compute + time.train if hidden else time.teacher)


def test_resident_blocks_spare_their_share_of_the_link() -> None:
    none, half = (plan(ask("h100-80gb", 1, guided=False, resident_blocks=count)) for count in (0, 20))
    assert teacher_seconds(half, Placement.STREAM) == pytest.approx(
        teacher_seconds(none, Placement.STREAM) / 2, rel=0.05
    )


def test_compiled_blocks_spare_time_on_a_gpu_where_compute_is_what_a_step_waits_for() -> None:
    plain, compiled = (plan(ask("h100-80gb", 1, 8, teacher_compile=flag)) for flag in (False, True))
    assert teacher_seconds(compiled, Placement.GPU) == pytest.approx(teacher_seconds(plain, Placement.GPU) / 1.25)
    plain, compiled = (plan(ask("h100-80gb", 1, guided=False, teacher_compile=flag)) for flag in (False, True))
    link = teacher_seconds(plain, Placement.STREAM)
    assert 0.95 * link < teacher_seconds(compiled, Placement.STREAM) <= link


def test_stream_keeps_the_blocks_whose_copies_compute_would_wait_for_as_far_as_they_find_room() -> None:
    def kept(gpu: str, batch: int, **settings: Any) -> int:
        row = plan(ask(gpu, 1, batch, **{"guided": False, "resident_blocks": None, **settings})).row(Placement.STREAM)
        assert row.within_margin
        return int(row.settings["resident_blocks"])

    assert kept("h100-80gb", 8) == 0
    waiting = kept("h200-141gb", 1)
    assert 0 < waiting < 40
    few = plan(ask("h200-141gb", 1, guided=False, resident_blocks=waiting - 2)).row(Placement.STREAM)
    enough = plan(ask("h200-141gb", 1, guided=False, resident_blocks=waiting + 2)).row(Placement.STREAM)
    none_waits = plan(ask("h200-141gb", 1, guided=False, resident_blocks=None)).row(Placement.STREAM)
    assert few.time and enough.time and none_waits.time
    assert few.time.teacher > none_waits.time.teacher == pytest.approx(enough.time.teacher, rel=0.03)
    assert 0 < kept("h100-80gb", 1) < waiting  # for want of room
    assert kept("h200-141gb", 1, resident_blocks=3) == 3


def test_micro_batches_share_one_pass_over_the_link() -> None:
    once, four = (plan(ask("h100-80gb", 1, guided=False, gradient_accumulation_steps=steps)) for steps in (1, 4))
    assert teacher_seconds(four, Placement.STREAM) < 1.1 * teacher_seconds(once, Placement.STREAM)


@pytest.mark.parametrize(("dtype", "passes"), [("int8", 1), ("float8", 3)])
def test_8_bit_blocks_are_read_and_written_once_a_step_and_float8_scaled_where_it_was_written(
    dtype: str, passes: int
) -> None:
    plain, stored = (
        plan(ask("h200-141gb", 1, gradient_accumulation_steps=2, teacher_dtype=name)) for name in ("bfloat16", dtype)
    )
    more = teacher_seconds(stored, Placement.GPU) - teacher_seconds(plain, Placement.GPU)
    block = WAN_14B.block_parameters
    assert more == pytest.approx(40 * block * (1 + 2 * passes) / (0.9 * 4.8e12), rel=0.02)


def test_checkpointing_takes_a_third_more_of_the_student() -> None:
    kept, again = (plan(ask("h100-80gb", 1, gradient_checkpointing=flag)).row(Placement.GPU).time for flag in (0, 1))
    assert kept is not None and again is not None
    assert again.student == pytest.approx(kept.student * 4 / 3, rel=0.03)


def test_the_caches_cost_grows_with_the_prompts() -> None:
    one, ten = (
        prepare_cost(ask("h100-80gb", 1), Placement.GPU, None, prompts=count, rollout_steps=8) for count in (100, 1000)
    )
    assert ten.latent_seconds == pytest.approx(10 * one.latent_seconds)
    # 16 channels of 104 x 60 in float32: 0.4 MB a prompt.
    assert ten.latent_bytes == 1000 * 4 * 16 * 104 * 60
    assert ten.embedding_bytes < 1000 * 512 * 4096 * 2


@pytest.mark.parametrize("placement", [Placement.DISK, Placement.STREAM])
def test_disk_takes_the_bytes_that_the_files_have_whatever_they_are_computed_in(placement: Placement) -> None:
    request = ask("h100-80gb", 1, teacher_dtype="float32")
    half, unknown = (
        request.change(model=replace(request.model, block_bytes=size)) for size in (2 * WAN_14B.block_parameters, None)
    )
    seconds = [teacher_seconds(plan(one), placement) for one in (half, unknown)]
    if placement is Placement.STREAM:
        assert seconds[0] == seconds[1]
        return
    assert seconds[0] == pytest.approx(40 * 2 * WAN_14B.block_parameters / 3e9, rel=0.05)
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.05)
    filled = [prepare_cost(one, placement, None, prompts=8, rollout_steps=8).latent_seconds for one in (half, unknown)]
    assert filled[1] == pytest.approx(2 * filled[0], rel=0.05)


def test_what_lies_outside_the_student_s_blocks_counts_once_for_each_micro_batch_and_grows_with_its_work() -> None:
    request = ask("h200-141gb", 1, gradient_accumulation_steps=2)
    rates = catalogue_rates(request.machines)

    def student(asked: PlanRequest, outside: float) -> float:
        return step_time(asked, Placement.GPU, None, serves_only=False, rates=replace(rates, outside=outside)).student

    assert student(request, 0.03) - student(request, 0.01) == pytest.approx(2 * 0.02)
    # With nothing beyond the speeds it is what blocks and outside take together.
    together = step_time(request, Placement.GPU, None, serves_only=False, rates=rates).student
    assert student(request, 0.0) == pytest.approx(together, rel=0.01)
    # Blocks that the host launches slowly are as many times slower; outside was measured by itself.
    slow = replace(rates, student=3.0, outside=0.0)
    times = step_time(request, Placement.GPU, None, serves_only=False, rates=slow)
    assert times.student == pytest.approx(3 * together, rel=0.02)
    assert "blocks x" in times.formulas[1] and "outside them" in times.formulas[1]


def test_an_update_takes_the_memory_s_time_or_the_host_s_for_its_calls() -> None:
    request = ask("h200-141gb", 1, optimizer="adamw_bf16")
    rates = replace(catalogue_rates(request.machines), operation=1e-12, launch=1e-12)

    def optimizer(**changes: float) -> float:
        return step_time(request, Placement.GPU, None, serves_only=False, rates=replace(rates, **changes)).optimizer

    traffic = optimizer()
    assert optimizer(memory=rates.memory / 2) == pytest.approx(2 * traffic)
    assert optimizer(operation=1e-3) > traffic
    many = updates(request.student, 1, 5120, 0)
    alone, joined = HOST_WORK["adamw_bf16"].alone, HOST_WORK["adamw_bf16"].joined
    calls = many.alone * alone + many.joined * joined
    assert optimizer(operation=1e-3) == pytest.approx(1e-3 * calls, rel=1e-6)
    assert optimizer(operation=0.0, launch=1e-2) == pytest.approx(many.alone * 2 * 1e-2)


def test_two_thirds_of_a_wan_s_parameters_are_small_enough_to_be_updated_together() -> None:
    architecture = replace(WAN_14B, num_layers=3)
    many = updates(architecture, 1, 5120, 0)
    tensors = [t for t in (*block_tensors(architecture) * 3, *outer_tensors(architecture))]
    assert many.alone == sum(tensor.numel >= JOINED for tensor in tensors) == 3 * 10 + 7
    assert many.joined + many.alone == len(tensors)
    assert updates(architecture, 4096, 5120, 0).alone < many.alone, "a rank's part may be small"
    assert updates(replace(architecture, num_attention_heads=20), 1, 5120, 3).joined == many.joined + 3
