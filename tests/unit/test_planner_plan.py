"""The plan: the hardware rows of the seed project, the choice, and what is said where nothing fits."""

from __future__ import annotations

from typing import Any

import pytest

from wandistill.catalog import find_gpu, find_model
from wandistill.planner.advice import advise, improve
from wandistill.planner.placements import Placement
from wandistill.planner.plan import Plan, plan
from wandistill.planner.request import Machines, PlanRequest
from wandistill.planner.search import largest, smallest
from wandistill.student_config import student_spec
from wandistill.units import parse_bytes

SMALL = {"gradient_checkpointing": True}
LARGE = {"gradient_checkpointing": True, "student_parallel": "fsdp", "optimizer": "adamw8bit"}


def ask(gpu: str | None, ranks: int, host: str, student: str = "1b", **settings: Any) -> PlanRequest:
    teacher = find_model(settings.pop("model", "wan2.2-t2v-a14b"))
    machines = Machines(find_gpu(gpu) if gpu else None, ranks, settings.pop("nodes", 1), parse_bytes(host), cores=16)
    spec = student_spec(student, teacher.architecture)
    size = settings.pop("size", (832, 480))
    return PlanRequest(teacher, spec.architecture, student, machines, *size, **settings)


# The rows of the seed project's guides, with a host memory that such a machine has.
ROWS = {
    "1x24 GB": ("rtx-3090", 1, "128GiB"),
    "1x48 GB": ("a6000", 1, "128GiB"),
    "2x24 GB": ("rtx-4090", 2, "128GiB"),
    "4x40 GB": ("a100-40gb", 4, "512GiB"),
    "CPU only": (None, 1, "256GiB"),
    "4x A100-80": ("a100-80gb", 4, "512GiB"),
    "4x RTX 3090": ("rtx-3090", 4, "256GiB"),
    "2x A6000": ("a6000", 2, "256GiB"),
    "1x A100-80": ("a100-80gb", 1, "128GiB"),
}
# Row, dtype -> the choice and the placements that fit with 5 % to spare, for A14B and a student of 1 B.
GOLDEN = {
    ("1x24 GB", "bfloat16"): ("stream", "stream offload disk cpu"),
    ("1x24 GB", "float8"): ("stream", "stream offload disk cpu"),
    ("1x48 GB", "bfloat16"): ("stream", "stream offload disk cpu"),
    ("1x48 GB", "float8"): ("gpu", "gpu stream offload disk cpu"),
    ("2x24 GB", "bfloat16"): ("stream", "stream offload disk cpu"),
    ("2x24 GB", "float8"): ("stream", "stream offload disk cpu"),
    ("4x40 GB", "bfloat16"): ("stream", "balanced sequential sharded stream offload disk cpu"),
    ("4x40 GB", "float8"): ("sharded", "gpu0 balanced sequential sharded stream offload disk cpu"),
    ("CPU only", "bfloat16"): ("gpu", "gpu stream offload disk cpu"),
    ("CPU only", "float8"): ("gpu", "gpu stream offload disk cpu"),
    ("4x A100-80", "bfloat16"): ("gpu", "gpu gpu0 balanced sequential sharded stream offload disk cpu"),
    ("4x A100-80", "float8"): ("gpu", "gpu gpu0 balanced sequential sharded stream offload disk cpu"),
    ("4x RTX 3090", "bfloat16"): ("stream", "stream offload disk cpu"),
    ("4x RTX 3090", "float8"): ("stream", "stream offload disk cpu"),
    ("2x A6000", "bfloat16"): ("stream", "stream offload disk cpu"),
    ("2x A6000", "float8"): ("sharded", "gpu0 balanced sequential sharded stream offload disk cpu"),
    ("1x A100-80", "bfloat16"): ("gpu", "gpu stream offload disk cpu"),
    ("1x A100-80", "float8"): ("gpu", "gpu stream offload disk cpu"),
}


def fitting(answer: Plan) -> str:
    return " ".join(row.placement.value for row in answer.rows if row.within_margin)


@pytest.mark.parametrize(("row", "dtype"), GOLDEN, ids=[f"{row} {dtype}" for row, dtype in GOLDEN])
def test_a_hardware_row_of_the_seed_project_has_its_placements(row: str, dtype: str) -> None:
    answer = plan(ask(*ROWS[row], teacher_dtype=dtype, **SMALL))
    assert answer.choice is not None
    assert (answer.choice.placement.value, fitting(answer)) == GOLDEN[row, dtype]


@pytest.mark.parametrize("row", ROWS)
def test_a_student_of_half_the_depth_fits_or_the_reason_says_what_is_missing(row: str) -> None:
    answer = plan(ask(*ROWS[row], "half", **LARGE))
    if row in ("1x24 GB", "2x24 GB"):
        assert answer.choice is None
        for line in answer.rows:
            if line.ranks:
                assert line.lack is not None and line.lack.missing > 0
                assert "lacks" in line.reason and "largest term" in line.reason
    else:
        assert answer.choice is not None


def test_the_acceptance_command_finds_a_placement() -> None:
    assert plan(ask("rtx-3090", 4, "256GiB")).choice is not None


def test_gpu_for_a14b_on_a_24_gb_card_does_not_fit() -> None:
    answer = plan(ask("rtx-3090", 1, "128GiB", placement="gpu"))
    assert answer.choice is None and "teacher weights" in answer.why


def test_auto_takes_gpu_wherever_it_leaves_the_margin() -> None:
    answer = plan(ask("b200-180gb", 4, "1TiB"))
    assert answer.choice is not None and answer.choice.placement is Placement.GPU
    times = [row.time.samples_per_second for row in answer.rows if row.time and row.within_margin]
    assert answer.choice.time is not None and answer.choice.time.samples_per_second == max(times)


def test_auto_leaves_the_margin_free_and_says_what_would_fit_without_it() -> None:
    request = ask("a100-80gb", 1, "128GiB")
    gpu = plan(request).row(Placement.GPU)
    tight = request.change_machines(gpu_memory=gpu.peak + 1)
    answer = plan(tight)
    assert answer.row(Placement.GPU).fits and not answer.row(Placement.GPU).within_margin
    assert answer.choice is not None and answer.choice.placement is not Placement.GPU
    chosen = plan(tight.change(memory_margin=0.0)).choice
    assert chosen is not None and chosen.placement is Placement.GPU


def test_where_only_tight_placements_fit_there_is_no_choice_but_their_names() -> None:
    request = ask("rtx-3090", 1, "128GiB", **SMALL)
    least = min(row.peak for row in plan(request).rows if row.ranks)
    answer = plan(request.change_machines(gpu_memory=least + 1))
    assert answer.choice is None and "cpu would fit, but leave less than 5% free" in answer.why


def test_a_placement_that_is_asked_for_is_taken_though_tight_and_says_so() -> None:
    request = ask("a100-80gb", 1, "128GiB", placement="gpu")
    peak = plan(request).row(Placement.GPU).peak
    answer = plan(request.change_machines(gpu_memory=peak + 1))
    assert answer.choice is not None and "leaves less than 5% free" in answer.why


def test_host_memory_decides_between_a_host_copy_and_the_disk() -> None:
    rows = {row.placement: row for row in plan(ask("rtx-3090", 1, "32GiB", **SMALL)).rows}
    assert rows[Placement.DISK].within_margin and not rows[Placement.STREAM].fits
    assert "the node's memory lacks" in rows[Placement.STREAM].reason


def test_placements_of_several_ranks_are_not_considered_with_one() -> None:
    answer = plan(ask("a100-80gb", 1, "128GiB"))
    for placement in (Placement.GPU0, Placement.BALANCED, Placement.SEQUENTIAL, Placement.SHARDED):
        assert answer.row(placement).reason == "with one rank it is gpu"


def test_a_disk_that_is_too_small_for_the_checkpoints_is_a_reason() -> None:
    answer = plan(ask("a100-80gb", 1, "128GiB").change_machines(disk=10**9))
    assert answer.choice is None and "the disk lacks" in answer.row(Placement.GPU).reason


CANNOT = {
    "4x RTX 3090, half": ask("rtx-3090", 4, "256GiB", "half"),
    "1x RTX 3090, half": ask("rtx-3090", 1, "64GiB", "half"),
    "4x RTX 3090, gpu asked for": ask("rtx-3090", 4, "256GiB", placement="gpu"),
    "2x RTX 4090, batch 32": ask("rtx-4090", 2, "128GiB", batch_size=32),
    "1x A100-80, float32 teacher, little host memory": ask("a100-80gb", 1, "6GiB", teacher_dtype="float32"),
    "8x L4, an average on the GPU": ask("l4", 8, "512GiB", "quarter", ema_device="gpu"),
}


@pytest.mark.parametrize("request_", CANNOT.values(), ids=CANNOT)
def test_every_advice_makes_the_run_fit_when_it_is_applied(request_: PlanRequest) -> None:
    before = plan(request_)
    assert before.choice is None
    advice = advise(before)
    assert advice
    for one in advice:
        changed = request_
        for change in one.changes:
            changed = change.apply(changed)
        answer = plan(changed)
        assert answer.choice is not None and answer.choice.placement is one.row.placement
        assert one.freed(before) == max(before.row(one.row.placement).peak - answer.choice.peak, 0)


@pytest.mark.parametrize("request_", CANNOT.values(), ids=CANNOT)
def test_no_advice_holds_a_shorter_one(request_: PlanRequest) -> None:
    flags = [frozenset(change.flags for change in one.changes) for one in advise(plan(request_))]
    assert not any(one < other for one in flags for other in flags)


def test_half_on_four_3090s_is_told_of_fsdp_8_bit_moments_and_more_gpus() -> None:
    told = " | ".join(one.flags for one in advise(plan(CANNOT["4x RTX 3090, half"])))
    assert "--student_parallel fsdp" in told and "--optimizer adamw8bit" in told and "--gpus 8" in told


def test_a_setting_with_which_a_faster_placement_fits_is_told() -> None:
    before = plan(ask("rtx-3090", 4, "256GiB"))
    better = improve(before)
    assert before.choice is not None and before.choice.time is not None and better is not None
    assert better.flags == "--student_parallel fsdp" and better.row.placement is Placement.STREAM
    assert before.choice.placement is Placement.OFFLOAD
    assert better.speed > 1.2 * before.choice.time.samples_per_second


def test_nothing_is_told_where_the_choice_is_the_fastest() -> None:
    assert improve(plan(ask("b200-180gb", 1, "1TiB"))) is None


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    request = ask("a100-80gb", 1, "128GiB", **SMALL)
    found = largest(request, "batch_size")
    assert found.value is not None
    best = int(found.value)
    assert plan(request.change(batch_size=best)).choice is not None
    assert plan(request.change(batch_size=best + 1)).choice is None


def test_the_largest_resolution_keeps_the_shape_and_fits() -> None:
    request = ask("a100-80gb", 1, "128GiB", **SMALL)
    found = largest(request, "resolution")
    assert found.value is not None
    width, height = map(int, found.value.split("x"))
    assert width % 16 == height % 16 == 0 and width / height == pytest.approx(832 / 480, rel=0.02)
    assert plan(request.change(width=width, height=height)).choice is not None
    assert plan(request.change(width=width + 16, height=round((width + 16) * 480 / 832 / 16) * 16)).choice is None


def test_the_fewest_gpus_are_enough_and_one_fewer_is_not() -> None:
    request = ask("a100-40gb", 1, "1TiB", "half", **LARGE)
    found = smallest(request, "gpus")
    assert found.value is not None and int(found.value) > 1
    assert plan(request.change_machines(ranks=int(found.value) - 1)).choice is None


def test_the_least_gpu_memory_is_enough_and_a_step_less_is_not() -> None:
    request = ask("rtx-3090", 1, "128GiB", **SMALL)
    found = smallest(request, "gpu_memory")
    assert found.value is not None
    memory = parse_bytes(found.value)
    assert plan(request.change_machines(gpu_memory=memory)).choice is not None
    assert plan(request.change_machines(gpu_memory=memory - 256 * 2**20)).choice is None


def test_an_inverse_question_that_nothing_answers_says_so() -> None:
    assert largest(ask("rtx-3090", 1, "64GiB", "half"), "batch_size").value is None
