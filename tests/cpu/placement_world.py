"""Runs the cases of `placement_cases.py` on real gloo ranks: `python placement_world.py FOLDER`.

Everything is imported once, then the ranks of a world are forked, so a world costs no import. What they find is
written to FOLDER/results.json: case name -> finding.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

# This file is in tests/cpu, its helpers in tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import placement_registered
import torch
import torch.distributed as dist
from placement_asks import steps
from placement_cases import IN_WORLDS, KILLED, LAYOUTS, WORLDS, Case
from placement_kinds import KINDS, Ranks
from tiny_wan import LAYOUTS as TINY
from tiny_wan import build_tiny_wan

from wandistill.config import from_mapping
from wandistill.errors import WandistillError
from wandistill.teacher import BUILDERS
from wandistill.train import distributed
from wandistill.train.distributed import World
from wandistill.train.watch import PeerWatch, peer_errors

SECONDS_PER_WORLD = 600.0
KILLED_AT_ONCE = 6


def start_rank(rank: int, ranks: int, nodes: int, port: int, device: str = "cpu") -> World:
    """Joins a world as torchrun lets a process join."""
    local = ranks // nodes
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank % local),
        LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(rank // local),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    return distributed.start(from_mapping({"device": device}))


def run_cases(rank: int, ranks: int, nodes: int, port: int, cases: Sequence[Case], folder: Path, output: Path) -> None:
    """What a rank of a world does; rank 0 writes the findings of all."""

    world = start_rank(rank, ranks, nodes, port)
    here = Ranks(world, folder)
    for case in cases:
        started = time.monotonic()
        try:
            finding = KINDS[case.kind](case, here)
        except Exception:
            finding = {"error": traceback.format_exc()}
            # Now: the others may wait for this rank, and never come to where findings are gathered.
            print(f"rank {rank}, {case.name}:\n{finding['error']}", file=sys.stderr, flush=True)
        everyone = world.gather(finding)
        if world.is_main:
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps([case.name, everyone, time.monotonic() - started]) + "\n")
        if any("error" in one for one in everyone):
            break  # the ranks may be out of step
    distributed.stop()


def run_and_die(rank: int, ranks: int, port: int, case: Case, folder: Path, said: Path) -> None:
    """A run whose last rank dies in the middle of a step; the others end as `wandistill train` ends."""
    with patch.object(distributed, "PeerWatch", lambda: PeerWatch(grace_seconds=3.0)):
        world = start_rank(rank, ranks, 1, port)
    logging.basicConfig(filename=said, force=True)
    setting = Ranks(world, folder).setting(case)
    teacher = BUILDERS[case.placement](setting)
    asks = steps(setting)[0]
    try:
        for number in range(1000):
            if rank == ranks - 1 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            ask = asks[number % len(asks)]
            teacher.result(teacher.request(ask.x, ask.t, ask.prompt, ask.expert, ask.guidance, ask.features))
            if case.variant == "stuck" and number == 3:
                time.sleep(1000)  # as a rank that waits for a GPU which waits for the dead one
            with peer_errors():
                dist.all_reduce(torch.zeros(1))  # the student's gradients
    except WandistillError as error:
        said.write_text(str(error), encoding="utf-8")
        os._exit(error.exit_code)


def start(ranks: int, work: Callable[[int, int], None]) -> list[BaseProcess]:
    """Forks the ranks of a world, each to do `work(rank, port)`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=(rank, port)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return list(processes)


def finish(processes: Sequence[BaseProcess], seconds: float) -> list[int | None]:
    """Waits for the ranks of a world; returns their exit codes."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def run_world(name: str, folder: Path) -> dict[str, Any]:
    """The findings of all cases of a world."""
    (ranks, nodes), output = WORLDS[name], folder / f"world {name}.jsonl"
    cases = [case for case in IN_WORLDS if case.world == name]
    processes = start(ranks, lambda rank, port: run_cases(rank, ranks, nodes, port, cases, folder, output))
    codes = finish(processes, SECONDS_PER_WORLD)
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()] if output.exists() else []
    found = {case: {"ranks": finding, "seconds": seconds} for case, finding, seconds in lines}
    return {**found, f"world {name}": {"codes": codes}}


def run_killed(cases: Sequence[Case], folder: Path) -> dict[str, Any]:
    """How worlds end of which a rank dies; all at once, since they mostly wait."""

    def begin(case: Case) -> tuple[float, list[Path], list[BaseProcess]]:
        ranks, _ = WORLDS[case.world]
        said = [folder / f"{case.name} {rank}" for rank in range(ranks)]
        work = lambda rank, port: run_and_die(rank, ranks, port, case, folder, said[rank])  # noqa: E731
        return time.monotonic(), said, start(ranks, work)

    found = {}
    for case, (started, said, processes) in [(case, begin(case)) for case in cases]:
        codes = finish(processes, 60.0)
        texts = [path.read_text(encoding="utf-8") if path.exists() else "" for path in said]
        found[case.name] = {"codes": codes, "said": texts, "seconds": time.monotonic() - started}
    return found


def build_teachers(folder: Path) -> None:
    for name in LAYOUTS:
        build_tiny_wan(TINY[name], folder / name)


def main(folder: Path) -> None:
    BUILDERS["registered"] = placement_registered.build
    # In a process of its own, so that this one has no threads when it forks.
    finish(start(1, lambda rank, port: build_teachers(folder)), SECONDS_PER_WORLD)
    found: dict[str, Any] = {}
    for name in WORLDS:
        found |= run_world(name, folder)
    for first in range(0, len(KILLED), KILLED_AT_ONCE):
        found |= run_killed(KILLED[first : first + KILLED_AT_ONCE], folder)
    (folder / "results.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
