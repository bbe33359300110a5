"""Copies, reads and compute that take longer than they do, at random: what is in the wrong order shows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from engine_setup import answers, asks, same
from torch import Tensor

from wandistill.models.wan import WanFolder
from wandistill.teacher import engine
from wandistill.teacher.base import Teacher
from wandistill.teacher.copy_stream import CopyStream
from wandistill.teacher.feeds import ReadAhead
from wandistill.teacher.record_reader import RecordReader

# The longest delay, one in every second place: on a GPU longer than the host takes to enqueue a block.
_CYCLES, _SECONDS = 10_000_000, 0.002


@contextmanager
def delayed(device: torch.device, seed: int) -> Iterator[None]:
    """Copies to `device`, gathers and blocks begin late on the device, and reads from disk on the host."""
    source = random.Random(seed)
    run, read, run_block = CopyStream.run, RecordReader.read, engine.run_block

    def on_device() -> None:
        if source.random() < 0.5:
            if device.type == "cuda":
                torch.cuda._sleep(source.randrange(_CYCLES))
            else:
                time.sleep(source.uniform(0, _SECONDS))

    def late_run(self: CopyStream, work: Callable[[], object], after: Any) -> Any:
        def late() -> None:
            on_device()
            work()

        return run(self, late, after)

    def late_read(self: RecordReader, *arguments: Any) -> None:
        time.sleep(source.uniform(0, _SECONDS))
        read(self, *arguments)

    def late_block(*arguments: Any) -> Any:
        on_device()
        return run_block(*arguments)

    with (
        patch.object(CopyStream, "run", late_run),
        patch.object(RecordReader, "read", late_read),
        patch.object(engine, "run_block", late_block),
    ):
        yield


def equal_steps(folder: WanFolder, ours: Teacher, reference: Teacher, steps: int, seed: int = 0) -> Iterator[bool]:
    """For each step, whether both answer one to three requests, of experts at random, alike to the bit."""
    source = random.Random(seed)
    for step in range(steps):
        experts = source.choices(folder.experts, k=source.randint(1, 3))
        requests = asks(folder, experts, batch=source.randint(1, 2), seed=step)
        yield same(answers(ours, requests), answers(reference, requests))


@contextmanager
def no_order() -> Iterator[None]:
    """The fault that delays must bring to light: slots and buffers are filled anew while they are still in use."""
    run, take, give = CopyStream.run, ReadAhead.take, ReadAhead.give

    def at_once(self: CopyStream, work: Callable[[], object], after: Any) -> Any:
        return run(self, work, None)

    def given_back(self: ReadAhead, wait: bool = True) -> Tensor | None:
        taken = take(self, wait)
        if taken is not None:
            give(self, None)
        return taken

    def too_late(self: ReadAhead, done: Any) -> None:
        """It was given back already."""

    with (
        patch.object(CopyStream, "run", at_once),
        patch.object(ReadAhead, "take", given_back),
        patch.object(ReadAhead, "give", too_late),
    ):
        yield
