"""Memory by term: known sums, and rules that hold whatever the numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from wandistill.catalog import find_gpu, find_model, gpus
from wandistill.device_map import Place
from wandistill.errors import ConfigError
from wandistill.planner.memory import NCCL_COMMUNICATOR
from wandistill.planner.placements import SPECS, Placement
from wandistill.planner.plan import plan
from wandistill.planner.records import shard_bytes, teacher_bytes
from wandistill.planner.request import OPTIMIZERS, TEACHER_DTYPES, Machines, PlanRequest
from wandistill.planner.student_memory import student_bytes
from wandistill.planner.teacher_memory import records
from wandistill.planner.terms import total
from wandistill.student_config import student_spec
from wandistill.units import GIB, parse_bytes

A14B = find_model("wan2.2-t2v-a14b")


def ask(
    model: str = "wan2.2-t2v-a14b",
    student: str = "1b",
    gpu: str | None = "a100-80gb",
    ranks: int = 4,
    host: str = "512GiB",
    size: tuple[int, int] = (832, 480),
    **settings: Any,
) -> PlanRequest:
    teacher = find_model(model)
    machines = Machines(find_gpu(gpu) if gpu else None, ranks, settings.pop("nodes", 1), parse_bytes(host), cores=16)
    spec = student_spec(student, teacher.architecture)
    settings = {"resident_blocks": 0, **settings}
    return PlanRequest(teacher, spec.architecture, spec.name, machines, *size, **settings)


def random_request(seed: int) -> PlanRequest:
    """A question drawn from everything that can be asked."""
    draw = random.Random(seed)
    model = draw.choice(["wan2.1-t2v-1.3b", "wan2.1-t2v-14b", "wan2.2-t2v-a14b", "wan2.2-ti2v-5b"])
    return ask(
        model,
        draw.choice(["half", "quarter", "1b"]),
        draw.choice([*gpus(), None]),
        draw.choice([1, 2, 3, 4, 8]),
        draw.choice(["64GiB", "256GiB", "1TiB"]),
        draw.choice([(832, 480), (480, 832), (1280, 704), (512, 512)]),
        nodes=draw.choice([1, 1, 2]),
        batch_size=draw.choice([1, 2, 3, 8]),
        gradient_accumulation_steps=draw.choice([1, 2]),
        teacher_dtype=draw.choice(TEACHER_DTYPES),
        teacher_micro_batch=draw.choice([0, 1, 2]),
        guided=draw.random() < 0.7,
        optimizer=draw.choice(OPTIMIZERS),
        mixed_precision=draw.choice(["no", "bf16"]),
        student_parallel=draw.choice(["ddp", "fsdp"]),
        ema_device=draw.choice(["gpu", "cpu", "none"]),
        gradient_checkpointing=draw.random() < 0.5,
        features=draw.random() < 0.3,
        embeddings=draw.choice(["cached", "online"]),
        save_samples=draw.random() < 0.5,
    )


REQUESTS = [random_request(seed) for seed in range(40)]


def test_adamw_takes_16_bytes_a_parameter() -> None:
    student = student_spec("half", A14B.architecture).architecture
    own = student_bytes(student, "adamw", 1, 5120, 0)
    assert own.weights + own.gradients + own.moments == 16 * student.parameters


def test_a_student_of_half_the_depth_in_bfloat16_with_8_bit_moments_takes_43_6_gb() -> None:
    student = student_spec("half", A14B.architecture).architecture
    own = student_bytes(student, "adamw8bit", 1, 5120, 0)
    # The scales of the moments and Wan's float32 parts are in it.
    assert own.weights + own.gradients + own.moments == pytest.approx(43.6e9, rel=0.01)


def test_fsdp_divides_the_student_and_keeps_the_float32_parts_of_half_weights_whole() -> None:
    student = student_spec("half", A14B.architecture).architecture
    whole, part = (student_bytes(student, "adamw_bf16", ranks, 5120, 0).weights for ranks in (1, 4))
    apart = 4 * student.float32_parameters
    assert part == pytest.approx((whole - apart) / 4 + apart, rel=1e-4)


@pytest.mark.parametrize(
    ("placement", "most"), [(Placement.STREAM, 2.6), (Placement.OFFLOAD, 1.2), (Placement.DISK, 2.0)]
)
def test_blocks_from_elsewhere_take_a_few_slots_of_the_gpu(placement: Placement, most: float) -> None:
    row = plan(ask()).row(placement)
    assert 0 < row.ranks[0].size("teacher slots") <= most * GIB
    assert row.ranks[0].size("teacher weights") == 0


def test_blocks_that_stream_keeps_by_itself_leave_the_margin_free() -> None:
    for gpu in ("rtx-3090", "a100-40gb", "a100-80gb"):
        row = plan(ask(gpu=gpu, gradient_checkpointing=True, resident_blocks=None)).row(Placement.STREAM)
        none = plan(ask(gpu=gpu, gradient_checkpointing=True)).row(Placement.STREAM)
        kept = int(row.settings["resident_blocks"])
        block = (row.peak - none.peak) / max(2 * kept, 1)
        assert row.within_margin == none.within_margin
        assert kept == 0 or block == records(ask(), Placement.STREAM).block
    assert int(plan(ask(gpu=None, resident_blocks=None)).row(Placement.STREAM).settings["resident_blocks"]) == 0


def test_resident_blocks_of_stream_stay_on_the_gpu() -> None:
    rank = plan(ask(resident_blocks=10)).row(Placement.STREAM).ranks[0]
    block = teacher_bytes(A14B.architecture, "bfloat16", 2).block
    assert rank.size("teacher weights") == 2 * 10 * block


@pytest.mark.parametrize(
    ("gpu", "ranks", "fetch", "count"),
    [
        ("a100-80gb", 4, "auto", 2),  # although compute may hide the link: more work never takes less memory
        ("a100-80gb", 4, "own", 1),
        ("a100-80gb", 1, "split", 0),
        ("rtx-3090", 4, "auto", 1),
        ("rtx-3090", 4, "split", 2),
    ],
)
def test_stream_takes_a_communicator_more_where_the_fetch_may_be_shared(
    gpu: str, ranks: int, fetch: str, count: int
) -> None:
    rank = plan(ask(gpu=gpu, ranks=ranks, stream_fetch=fetch)).row(Placement.STREAM).ranks[0]
    assert rank.size("nccl buffers") == count * NCCL_COMMUNICATOR


def test_8_bit_storage_halves_the_teacher_and_takes_one_wide_block() -> None:
    wide, narrow = (teacher_bytes(A14B.architecture, dtype, 2) for dtype in ("bfloat16", "int8"))
    assert narrow.total == pytest.approx(wide.total / 2, rel=0.02)
    assert narrow.wide == wide.block and wide.wide == 0
    rank = plan(ask(teacher_dtype="int8")).row(Placement.STREAM).ranks[0]
    assert rank.size("teacher wide block") == wide.block


def test_8_bit_storage_is_compared_with_a_bfloat16_teacher_from_disk_before_the_student_is_built() -> None:
    kept = teacher_bytes(A14B.architecture, "bfloat16", 2)
    for placement in (Placement.GPU, Placement.STREAM, Placement.DISK):
        row = plan(ask(ranks=1, teacher_dtype="int8")).row(placement)
        assert row.node is not None
        host = {term.name: term.size for term in row.node.host.phases["quantization"]}
        assert host["reference buffers"] == 4 * kept.block and host["reference copy"] == 2 * kept.outer
        device = {term.name: term.size for term in row.ranks[0].phases["quantization"]}
        assert device["reference slots"] == 2 * kept.block + kept.outer
        assert not any("student" in name for name in (*host, *device))
        plain = plan(ask(ranks=1)).row(placement)
        assert plain.node is not None and "quantization" not in {*plain.ranks[0].phases, *plain.node.host.phases}


def test_only_a_resident_teacher_takes_memory_of_the_node_while_it_loads() -> None:
    for dtype in ("bfloat16", "int8"):
        for row in plan(ask(ranks=1, teacher_dtype=dtype)).rows:
            assert row.node is None or ("loading" in row.node.host.phases) == (row.placement is Placement.GPU)


def test_float32_parts_stay_float32_in_every_dtype() -> None:
    sizes = {dtype: teacher_bytes(A14B.architecture, dtype, 2).float32 for dtype in ("float16", "bfloat16", "int8")}
    assert set(sizes.values()) == {4 * A14B.architecture.float32_parameters}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_parts_of_a_sharded_teacher_are_one_teacher(ranks: int, dtype: str) -> None:
    row = plan(ask(ranks=ranks, teacher_dtype=dtype)).row(Placement.SHARDED)
    parts = sum(rank.size("teacher weights") for rank in row.ranks)
    whole = 2 * teacher_bytes(A14B.architecture, dtype, 2).total
    # Each part of a record ends at a page.
    assert whole <= parts <= whole + 2 * 41 * ranks * 8192
    assert max(shard_bytes(A14B.architecture, dtype, 2, ranks, 2).own) <= 1.03 * whole / ranks


@pytest.mark.parametrize("placement", [Placement.BALANCED, Placement.SEQUENTIAL])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_stages_of_a_pipeline_are_one_teacher(placement: Placement, ranks: int) -> None:
    row = plan(ask(ranks=ranks)).row(placement)
    parts = sum(rank.size("teacher weights") for rank in row.ranks)
    whole = 2 * teacher_bytes(A14B.architecture, "bfloat16", 2).total
    # Embedding and head are records of their own here.
    assert whole <= parts <= whole + 2 * 8192


def test_balanced_gives_each_rank_a_block_more_or_less() -> None:
    ranks = plan(ask()).row(Placement.BALANCED).ranks
    sizes = [rank.size("teacher weights") for rank in ranks]
    assert max(sizes) - min(sizes) <= 2 * 2 * teacher_bytes(A14B.architecture, "bfloat16", 2).block


def test_sequential_fills_the_first_gpus_and_leaves_the_last_one_empty() -> None:
    sizes = [rank.size("teacher weights") for rank in plan(ask()).row(Placement.SEQUENTIAL).ranks]
    assert sizes[0] > sizes[-1] == 0


def test_gpu0_puts_the_teacher_on_its_rank_alone() -> None:
    row = plan(ask(nodes=2, teacher_rank=5)).row(Placement.GPU0)
    sizes = [rank.size("teacher weights") for rank in row.ranks]
    assert len(sizes) == 8 and sizes[5] > 50 * GIB and sum(sizes) == sizes[5]


def test_gpu0_s_teacher_rank_stops_training_where_both_do_not_fit() -> None:
    row = plan(ask(student="half", student_parallel="fsdp", optimizer="adamw_bf16")).row(Placement.GPU0)
    assert row.within_margin and row.settings["teacher_rank_trains"] == "no"
    assert row.ranks[0].size("student weights") == 0 < row.ranks[1].size("student weights")


def test_a_device_map_puts_blocks_where_it_says() -> None:
    places = (Place(0), *[Place(0)] * 20, *[Place(1, "cpu")] * 20, Place(1))
    row = plan(ask(ranks=2, device_map=places)).row(Placement.CUSTOM)
    block = teacher_bytes(A14B.architecture, "bfloat16", 2).block
    assert row.ranks[0].size("teacher weights") > 2 * 20 * block > row.ranks[1].size("teacher weights")
    assert row.ranks[1].size("teacher slots") == 2 * block
    assert row.node is not None and row.node.host.size("teacher parts") == 2 * 20 * block


@pytest.mark.parametrize("placement", [Placement.STREAM, Placement.OFFLOAD, Placement.CPU])
def test_a_node_keeps_one_copy_however_many_ranks(placement: Placement) -> None:
    copies = []
    for ranks in (1, 4, 8):
        node = plan(ask(ranks=ranks)).row(placement).node
        assert node is not None and node.shm == node.host.size("teacher copy") > 0
        copies.append(node.shm)
    assert len(set(copies)) == 1


def test_disk_keeps_only_what_lies_outside_the_blocks_and_its_buffers() -> None:
    own, node = teacher_bytes(A14B.architecture, "bfloat16", 2), plan(ask()).row(Placement.DISK).node
    assert node is not None
    assert node.host.size("teacher copy") == 2 * own.outer
    assert node.host.size("disk buffers") == 4 * 4 * own.block


def test_without_a_gpu_everything_is_in_the_node_s_memory() -> None:
    row = plan(ask(gpu=None, ranks=2)).row(Placement.GPU)
    assert row.node is not None
    assert row.node.host.size("ranks' tensors") == sum(rank.peak for rank in row.ranks)
    assert all(rank.size("cuda context") == 0 for rank in row.ranks)


def test_ddp_s_gradients_are_there_while_the_teacher_computes() -> None:
    one, four = (plan(ask(ranks=ranks)).row(Placement.STREAM).ranks[0] for ranks in (1, 4))
    names = [{term.name for term in rank.phases["teacher"]} for rank in (one, four)]
    assert "student gradients" not in names[0] and "student gradients" in names[1]


def test_fsdp_keeps_whole_gradients_between_micro_batches() -> None:
    once, twice = (
        plan(ask(student_parallel="fsdp", gradient_accumulation_steps=steps)).row(Placement.STREAM).ranks[0]
        for steps in (1, 2)
    )
    assert twice.size("student gradients") > 3 * once.size("student gradients")


def test_the_text_encoder_is_there_throughout_with_online_embeddings() -> None:
    cached, online = (plan(ask(embeddings=kind)).row(Placement.STREAM).ranks[0] for kind in ("cached", "online"))
    assert cached.size("text encoder") == 0 < online.size("text encoder")


@pytest.mark.parametrize("request_", REQUESTS, ids=range(len(REQUESTS)))
def test_terms_sum_to_the_peak_and_no_term_is_negative(request_: PlanRequest) -> None:
    for row in plan(request_).rows:
        for rank in [*row.ranks, *([row.node.host] if row.node else [])]:
            assert all(term.size >= 0 and term.formula for term in rank.terms if term.size)
            assert sum(term.size for term in rank.terms) == rank.peak
            assert rank.peak_allocated <= rank.peak == max(sum(t.size for t in p) for p in rank.phases.values())


@pytest.mark.parametrize("request_", REQUESTS, ids=range(len(REQUESTS)))
def test_more_memory_never_makes_a_placement_stop_fitting(request_: PlanRequest) -> None:
    rows = plan(request_).rows
    machines = request_.machines
    larger = request_.change_machines(
        host_memory=2 * machines.host_memory, gpu_memory=2 * machines.device_memory if machines.gpu else None
    )
    for before, after in zip(rows, plan(larger).rows, strict=True):
        assert after.fits >= before.fits and after.within_margin >= before.within_margin


@pytest.mark.parametrize("request_", REQUESTS, ids=range(len(REQUESTS)))
@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 9},
        {"width": 1664, "height": 960},
        {"gradient_accumulation_steps": 4},
        {"features": True},
        {"ema_device": "gpu"},
        {"save_samples": True},
    ],
    ids=str,
)
def test_more_work_never_takes_less_memory(request_: PlanRequest, change: dict[str, Any]) -> None:
    rows, more = plan(request_).rows, plan(request_.change(**change)).rows
    for before, after in zip(rows, more, strict=True):
        # gpu0's teacher rank may stop training, and sequential moves blocks to where there is room.
        if before.ranks and after.ranks and before.placement not in (Placement.GPU0, Placement.SEQUENTIAL):
            for rank, larger in zip(before.ranks, after.ranks, strict=True):
                # As many rollouts at once as have 16,384 tokens: with larger pictures it may be fewer tokens.
                phases = [phase for phase in rank.phases if phase != "rollouts"]
                assert all(total(larger.phases[phase]) >= total(rank.phases[phase]) for phase in phases)


@pytest.mark.parametrize("request_", REQUESTS, ids=range(len(REQUESTS)))
def test_checkpointing_never_takes_more_memory(request_: PlanRequest) -> None:
    kept = plan(request_.change(gradient_checkpointing=False)).rows
    again = plan(request_.change(gradient_checkpointing=True)).rows
    for before, after in zip(kept, again, strict=True):
        if before.ranks and after.ranks and before.placement not in (Placement.GPU0, Placement.SEQUENTIAL):
            # A recomputed block's gradient waits beside its input: 2 B an element more of a peak that gradients make.
            assert after.peak <= 1.02 * before.peak


def test_every_placement_has_a_spec_that_says_what_it_is() -> None:
    assert set(SPECS) == set(Placement)
    assert all(spec.summary and spec.copies for spec in SPECS.values())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"optimizer": "adam"}, "--optimizer adam: is not one of adamw"),
        ({"teacher_dtype": "fp8"}, "--teacher_dtype fp8"),
        ({"batch_size": 0}, "--batch_size 0: must be at least 1"),
        ({"memory_margin": 1.0}, "--memory_margin 1.0"),
    ],
)
def test_a_setting_that_cannot_be_is_an_error_that_names_it(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ask(**settings)
