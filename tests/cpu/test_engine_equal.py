"""The block engine gives what the resident teacher gives, to the bit, from wherever its blocks come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_setup import ENGINE, Ask, answers, asks, place, resident, same, setting

from wandistill.models.wan import WanFolder, open_teacher
from wandistill.teacher.base import Expert
from wandistill.teacher.layout import Record
from wandistill.teacher.record_reader import RecordReader

KINDS = ("t2v-1.3b", "t2v-14b", "t2v-a14b", "ti2v-5b", "embedded")


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tiny_wan: Callable[[str], Path]) -> WanFolder:
    return open_teacher(request.param if request.param == "embedded" else str(tiny_wan(request.param)))


@pytest.fixture
def two_experts(tiny_wan: Callable[[str], Path]) -> WanFolder:
    return open_teacher(str(tiny_wan("t2v-a14b")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_placement_of_the_engine_equals_the_resident_teacher(
    folder: WanFolder, dtype: torch.dtype, tmp_path: Path
) -> None:
    of = setting(folder, tmp_path, dtype)
    requests = asks(folder, features=(0, 2))
    expected = answers(resident(of), requests)
    for name in ENGINE:
        teacher = place(name, of)
        assert same(answers(teacher, requests), expected), name
        teacher.close()


@pytest.mark.parametrize(
    ("batch", "guidance", "micro_batch", "features"),
    [(1, 1.0, 0, ()), (3, 1.0, 2, (2,)), (3, 4.0, 4, (0, 1, 2)), (2, 4.0, 1, (1,)), (2, 0.0, 3, ())],
    ids=["one sample, unguided", "unguided, cut", "guided, cut unevenly", "sample by sample", "guidance of zero"],
)
def test_batches_are_cut_as_the_resident_teacher_cuts_them(
    two_experts: WanFolder, tmp_path: Path, batch: int, guidance: float, micro_batch: int, features: tuple[int, ...]
) -> None:
    of = setting(two_experts, tmp_path, teacher_micro_batch=micro_batch)
    requests = asks(two_experts, batch=batch, guidance=guidance, features=features)
    teacher = place("stream", of)
    assert same(answers(teacher, requests), answers(resident(of), requests))
    teacher.close()


def test_a_cpu_with_bfloat16_kernels_computes_in_bfloat16(
    two_experts: WanFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wandistill.teacher.layout.cpu_computes", lambda dtype: True)
    of = setting(two_experts, tmp_path, torch.bfloat16)
    requests = asks(two_experts, features=(1,))
    expected = answers(resident(of), requests)
    for name in ENGINE:
        teacher = place(name, of)
        assert same(answers(teacher, requests), expected), name
        teacher.close()


@pytest.mark.parametrize("name", ENGINE)
def test_requests_of_both_experts_may_wait_and_be_answered_in_any_order(
    two_experts: WanFolder, tmp_path: Path, name: str
) -> None:
    of = setting(two_experts, tmp_path)
    high, low = Expert.HIGH, Expert.LOW
    requests = asks(two_experts, [high, low, high, low, low], features=(1,))
    # Two requests may share an expert and differ in everything else.
    requests[2] = Ask(**{**vars(requests[2]), "features": (), "guidance": 1.0})
    expected = answers(resident(of), requests)
    teacher = place(name, of)
    tickets = [teacher.request(r.x, r.t, r.prompt, r.expert, r.guidance, r.features) for r in requests]
    last_first = [teacher.result(ticket) for ticket in reversed(tickets)]
    assert same(last_first[::-1], expected)
    # Step after step, the expert drawn anew, the next step asked for before the last answer is used.
    ahead = [teacher.request(r.x, r.t, r.prompt, r.expert, r.guidance, r.features) for r in requests[:1]]
    for number, r in enumerate([*requests[1:], requests[0]]):
        (answer,) = [teacher.result(ticket) for ticket in ahead]
        ahead = [teacher.request(r.x, r.t, r.prompt, r.expert, r.guidance, r.features)]
        assert same([answer], expected[number : number + 1])
    teacher.close()


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_blocks_that_stay_on_the_device_change_nothing(two_experts: WanFolder, tmp_path: Path, kept: int) -> None:
    of = setting(two_experts, tmp_path, resident_blocks=kept)
    requests = asks(two_experts)
    teacher = place("stream", of)
    expected = answers(resident(of), requests)
    assert same(answers(teacher, requests), expected)
    assert same(answers(teacher, requests), expected)
    teacher.close()


def swap_blocks(record: Record) -> Record:
    return record._replace(block=1 - record.block) if record.block in (0, 1) else record


def swap_experts(record: Record) -> Record:
    return record._replace(expert=Expert.LOW if record.expert is Expert.HIGH else Expert.HIGH)


@pytest.mark.parametrize("name", ENGINE)
@pytest.mark.parametrize("fault", [swap_blocks, swap_experts])
def test_a_swapped_block_or_a_wrong_expert_is_seen(
    two_experts: WanFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fault: Callable[[Record], Record],
) -> None:
    of = setting(two_experts, tmp_path)
    requests = asks(two_experts)
    plan = RecordReader._plan
    monkeypatch.setattr(RecordReader, "_plan", lambda self, record: plan(self, fault(record)))
    teacher = place(name, of)
    assert not same(answers(teacher, requests), answers(resident(of), requests))
    teacher.close()
