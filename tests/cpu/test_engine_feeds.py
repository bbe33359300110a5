"""Slots and read-ahead: what is brought when, never too early into a slot, never more than there is room for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine_setup import answers, asks, place, resident, same, setting

from wandistill.models.wan import WanFolder, open_teacher
from wandistill.teacher.base import Expert
from wandistill.teacher.copy_stream import CopyStream, Mark
from wandistill.teacher.feeds import Feed, ReadAhead, Slots
from wandistill.teacher.host_copy import HostCopy
from wandistill.teacher.layout import OUTER, Record

CPU = torch.device("cpu")
BLOCKS = [Record(Expert.HIGH, block) for block in range(12)]


@pytest.fixture
def folder(tiny_wan: Callable[[str], Path]) -> WanFolder:
    return open_teacher(str(tiny_wan("t2v-a14b")))


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """The records that were taken out of the host copy, in order."""
    records: list[Record] = []
    view = HostCopy.view

    def noted(self: HostCopy, record: Record) -> torch.Tensor:
        records.append(record)
        return view(self, record)

    monkeypatch.setattr(HostCopy, "view", noted)
    return records


@dataclass(frozen=True)
class Done:
    """The point after a late copy."""

    future: Future[None]

    def synchronize(self) -> None:
        self.future.result()


class LateCopies(CopyStream):
    """What a GPU's copy stream is on a CPU: copies in order on a thread, each after a random delay."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pool = ThreadPoolExecutor(1)
        self._random = random.Random(0)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> Mark | None:
        def late(delay: float) -> None:
            if after is not None:
                after.synchronize()
            time.sleep(delay)
            target.copy_(source)

        return Done(self._pool.submit(late, self._random.choice([0.0, 0.0, 0.002])))

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            mark.synchronize()

    def synchronize(self) -> None:
        self._pool.submit(lambda: None).result()


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wandistill.teacher.assembly.CopyStream", LateCopies)


@pytest.fixture
def stale_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of a slot that is filled anew while the record in it is still to be computed with."""
    take, give = Slots.take, Slots.give

    def take_and_give(self: Slots, wait: bool = True) -> torch.Tensor | None:
        slot = take(self, wait)
        give(self, None)
        return slot

    monkeypatch.setattr(Slots, "take", take_and_give)
    monkeypatch.setattr(Slots, "give", lambda self, done: None)


@pytest.mark.parametrize("name", ["offload", "stream"])
def test_late_copies_change_nothing(folder: WanFolder, tmp_path: Path, name: str, late_copies: None) -> None:
    of = setting(folder, tmp_path)
    requests = asks(folder, [Expert.HIGH, Expert.LOW, Expert.LOW, Expert.HIGH, Expert.HIGH])
    reference, teacher = resident(of), place(name, of)
    expected = [answers(reference, [request])[0] for request in requests]
    for _ in range(5):
        assert same([answers(teacher, [request])[0] for request in requests], expected)
    teacher.close()


@pytest.mark.parametrize("name", ["offload", "stream"])
@pytest.mark.parametrize("late", [False, True], ids=["copies at once", "late copies"])
def test_a_slot_that_is_reused_too_early_is_seen(
    folder: WanFolder, tmp_path: Path, name: str, late: bool, stale_slots: None, request: pytest.FixtureRequest
) -> None:
    if late:
        request.getfixturevalue("late_copies")
    of = setting(folder, tmp_path)
    requests = asks(folder)
    teacher = place(name, of)
    expected = answers(resident(of), requests)
    assert not all(same(answers(teacher, requests), expected) for _ in range(5))
    teacher.close()


def test_a_request_brings_the_first_blocks_before_its_answer_is_asked_for(
    folder: WanFolder, tmp_path: Path, brought: list[Record]
) -> None:
    teacher = place("stream", setting(folder, tmp_path))
    first, second = asks(folder, [Expert.HIGH, Expert.LOW])
    assert brought == []
    ticket = teacher.request(first.x, first.t, first.prompt, first.expert, 1.0)
    assert brought == [(Expert.HIGH, OUTER), (Expert.HIGH, 0), (Expert.HIGH, 1)]
    teacher.result(ticket)
    brought.clear()
    # The next step's, while the student works on this one's answer.
    teacher.request(second.x, second.t, second.prompt, second.expert, 1.0)
    assert brought == [(Expert.LOW, OUTER), (Expert.LOW, 0), (Expert.LOW, 1)]
    teacher.close()


@pytest.mark.parametrize("name", ["cpu", "offload", "stream"])
def test_all_waiting_requests_pass_a_block_while_it_is_there(
    folder: WanFolder, tmp_path: Path, brought: list[Record], name: str
) -> None:
    teacher = place(name, setting(folder, tmp_path, teacher_micro_batch=1))
    for _ in range(2):
        brought.clear()
        answers(teacher, asks(folder, [Expert.HIGH] * 4))
        assert [record.block for record in brought if record.block != OUTER] == [0, 1, 2]
        assert {record.expert for record in brought} == {Expert.HIGH}, "the expert not in use costs nothing"
    assert OUTER not in {record.block for record in brought}, "the outer part of the same expert stays"
    teacher.close()


def test_resident_blocks_are_spread_and_not_brought_again(
    folder: WanFolder, tmp_path: Path, brought: list[Record]
) -> None:
    teacher = place("stream", setting(folder, tmp_path, resident_blocks=2))
    assert sorted({record.block for record in brought}) == [0, 1]
    brought.clear()
    answers(teacher, asks(folder, [Expert.LOW]))
    assert [record.block for record in brought] == [OUTER, 2]
    teacher.close()


def test_read_ahead_fills_its_buffers_and_no_more() -> None:
    read: list[int] = []
    feed = ReadAhead(lambda record, buffer: read.append(record.block), list(torch.zeros(3, 4096, dtype=torch.uint8)))
    feed.expect(BLOCKS)
    for done in range(len(BLOCKS)):
        assert feed.take() is not None
        # One is out, two may be read ahead of it.
        expected = list(range(min(done + 3, len(BLOCKS))))
        deadline = time.monotonic() + 30
        while len(read) < len(expected) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.005)  # time for the reader to break the rule
        assert read == expected
        feed.give(None)
    assert feed.take(wait=False) is None
    feed.close()


def test_a_record_is_not_read_over_one_that_is_still_copied_from() -> None:
    order: list[str] = []

    class Copying:
        def synchronize(self) -> None:
            order.append("copied")

    feed = ReadAhead(
        lambda record, buffer: order.append(f"read {record.block}"), list(torch.zeros(1, 8, dtype=torch.uint8))
    )
    feed.expect(BLOCKS[:2])
    feed.take()
    feed.give(Copying())
    feed.take()
    assert order == ["read 0", "copied", "read 1"]
    feed.close()


def test_an_error_of_the_reading_thread_is_the_takers() -> None:
    def fail(record: Record, buffer: torch.Tensor) -> None:
        raise OSError("the disk is gone")

    feed = ReadAhead(fail, list(torch.zeros(2, 8, dtype=torch.uint8)))
    feed.expect(BLOCKS)
    with pytest.raises(OSError, match="the disk is gone"):
        feed.take()
    feed.close()
    assert "read-ahead" not in {thread.name for thread in threading.enumerate()}


def feed_of(read: Callable[[Record, torch.Tensor], None], slots: int) -> Feed:
    """Three blocks read ahead, used in place or through slots."""
    feed = ReadAhead(read, list(torch.zeros(3, 8, dtype=torch.uint8)))
    return Slots(feed, 8, slots, CPU, CopyStream(CPU)) if slots else feed


@pytest.mark.parametrize("slots", [0, 1, 2], ids=["in place", "one slot", "two slots"])
def test_a_block_is_read_while_the_one_before_is_computed_with(slots: int) -> None:
    met = threading.Barrier(2, timeout=30)

    def read(record: Record, buffer: torch.Tensor) -> None:
        if record.block > 0:
            met.wait()

    feed = feed_of(read, slots)
    feed.expect(BLOCKS)
    for record in BLOCKS:
        feed.take()
        if record != BLOCKS[-1]:
            met.wait()
        feed.give(None)
    feed.close()


@pytest.mark.parametrize(("reading", "computing"), [(0.03, 0.02), (0.02, 0.03)], ids=["slow disk", "slow compute"])
@pytest.mark.parametrize("slots", [0, 2], ids=["in place", "two slots"])
def test_a_step_takes_the_longer_of_reading_and_computing(reading: float, computing: float, slots: int) -> None:
    def seconds() -> float:
        feed = feed_of(lambda record, buffer: time.sleep(reading), slots)
        begin = time.monotonic()
        feed.expect(BLOCKS)
        for _ in BLOCKS:
            feed.take()
            time.sleep(computing)
            feed.give(None)
        taken = time.monotonic() - begin
        feed.close()
        return taken

    bound = 1.1 * len(BLOCKS) * max(reading, computing) + min(reading, computing)
    # A busy machine wakes sleepers late; one quiet moment is enough to see the overlap.
    assert any(seconds() <= bound for _ in range(5))
