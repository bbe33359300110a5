"""Ranks without torch.distributed, and a teacher that counts, for the tests of the caches."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253 - a helper of tests/cpu
from torch import Tensor  # noqa: TID253

from wandistill.data.store import Store
from wandistill.teacher.base import Expert, Prompt, TeacherOutput
from wandistill.train.distributed import World

if TYPE_CHECKING:
    from wandistill.data.latents import LatentCache, RolloutSettings
    from wandistill.models.wan import WanFolder

# Generous: every rank imports its libraries anew, and other tests may keep the cores busy.
SECONDS = 400


@dataclass(frozen=True)
class ProcessWorld(World):
    """Ranks that wait at a barrier of multiprocessing or threading."""

    gate: Any = None

    def barrier(self) -> None:
        if self.gate is not None:
            self.gate.wait(SECONDS)


def world(rank: int = 0, size: int = 1, gate: Any = None) -> ProcessWorld:
    """One rank on the CPU."""
    return ProcessWorld(rank, size, rank, size, torch.device("cpu"), gate=gate)


def run_processes(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(world, *args)` returns on each of `size` ranks, each a process of its own."""
    context = multiprocessing.get_context("spawn")
    gate, results = context.Barrier(size), context.Queue()
    processes = [
        context.Process(target=_run_rank, args=(results, rank, size, gate, function, args), daemon=True)
        for rank in range(size)
    ]
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + SECONDS
    try:
        for process in processes:
            process.start()
        while len(answers) < size:
            try:
                answers |= [results.get(timeout=0.2)]
            except queue.Empty:
                failed = [process.exitcode for process in processes if process.exitcode]
                assert not failed and time.monotonic() < deadline, f"ranks failed or are late: {failed}"
    finally:
        for process in processes:
            process.kill()
    return [answers[rank] for rank in range(size)]


def run_threads(size: int, function: Callable[[World], Any]) -> list[Any]:
    """The same with a thread for each rank, which costs no imports; `function` must load no models."""
    gate = threading.Barrier(size)

    def run(rank: int) -> Any:
        try:
            return function(world(rank, size, gate))
        except BaseException:
            gate.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def _run_rank(results: Any, rank: int, size: int, gate: Any, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    results.put((rank, function(world(rank, size, gate), *args)))


class CountingTeacher:
    """A teacher whose velocity is a simple function of its inputs; it remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[float, Expert, float, int]] = []  # t, expert, guidance, batch size

    def request(
        self, x: Tensor, t: Tensor, prompt: Prompt, expert: Expert, guidance: float, features: Sequence[int] = ()
    ) -> Tensor:
        self.requests.append((float(t[0]), expert, guidance, len(x)))
        mean = prompt.positive.mean(dim=(1, 2)).view(-1, 1, 1, 1, 1)
        return guidance * torch.sin(x + mean) * t.view(-1, 1, 1, 1, 1)

    def result(self, ticket: Tensor) -> TeacherOutput:
        return TeacherOutput(ticket, {})

    def close(self) -> None:
        self.requests.clear()


def settings(**changes: Any) -> RolloutSettings:
    """Settings of rollouts, small."""
    from wandistill.data.latents import RolloutSettings

    values: dict[str, Any] = {
        "rollouts": 1,
        "resolution": (32, 32),
        "steps": 4,
        "shift": 3.0,
        "guidance": 4.0,
        "guidance_low": 3.0,
        "negative_prompt": "",
        "seed": 5,
        "teacher_dtype": "float32",
    }
    return RolloutSettings(**{**values, **changes})


def draw_rollouts(
    here: World,
    folder: WanFolder,
    teacher: Any,
    prompts: Sequence[str],
    chosen: RolloutSettings,
    cache_dir: Path,
) -> LatentCache:
    """Embeddings and rollouts of `prompts`, as a run makes them."""
    from wandistill.data.embeddings import build_embeddings, embedding_ingredients, embedding_work
    from wandistill.data.latents import build_rollouts, rollout_work

    work = embedding_work(folder, prompts, cache_dir, torch.float32)
    embeddings = build_embeddings(work, folder, torch.float32, here)
    ingredients = embedding_ingredients(folder, torch.float32)
    rollouts = rollout_work(folder, prompts, chosen, ingredients, cache_dir)
    return build_rollouts(rollouts, folder, lambda: teacher, embeddings, chosen, here)


def rank_fills_store(here: World, root: Path, count: int) -> list[float]:
    """One rank of several writes its part of `count` items, then reads all of them."""
    store = Store(root, "things", {"of": "ranks"})
    store.begin_writing()
    here.barrier()
    with store.writer() as writer:
        for index in range(here.rank, count, here.size):
            writer.add(f"item {index}", {"value": torch.tensor(float(index))})
            if index % 4 == 0:
                writer.flush()
    here.barrier()
    store.refresh()
    return [float(value) for value in store.read([f"item {index}" for index in range(count)], "value")]
