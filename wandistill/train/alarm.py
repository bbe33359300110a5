"""When memory runs out on one rank: tells the others, makes one report of all, and ends them.

The main thread of a rank may wait for ever inside NCCL for one that has failed. So a thread of each rank, on a
connection to the job's store that nothing else uses, keeps the rank's memory there for all to read, notices the alarm
of another rank, and ends the process past all that hangs.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from wandistill.config import TrainConfig
from wandistill.errors import ExitCode, OutOfMemory
from wandistill.launch import records, report
from wandistill.launch.causes import Cause, Kind, cause_of, sticky_note
from wandistill.launch.cgroup import MemoryCgroup
from wandistill.launch.memory import RankMemory, limit_bytes, resident_bytes
from wandistill.launch.question import Question
from wandistill.launch.report import Command, OomReport

if TYPE_CHECKING:
    from wandistill.train.distributed import World

_log = logging.getLogger(__name__)

_INTERVAL = 1.0
# How long the peers get to tell their memory, and wait for the report; both may be stuck for good.
_ANSWERS, _REPORT = 5.0, 15.0
_ALARM, _TOLD = "wandistill/oom", "wandistill/oom/told"


class Alarm:
    """Watches for lack of memory, here and on the other ranks, until `close`."""

    def __init__(self, world: World, config: TrainConfig) -> None:
        self._world, self._config = world, config
        self._phase = "start"
        self._question: Question | None = None
        self._lock = threading.Lock()  # held by the one that ends the process
        self._closed = threading.Event()
        self._cgroup = MemoryCgroup.own()
        self._kills = self._cgroup.oom_kills() if self._cgroup else 0
        self._store: dist.Store | None = None
        if world.size > 1:
            # A connection of its own: a call that waits on another blocks all that share it.
            self._store = dist.distributed_c10d._get_default_store().clone()
        self._thread = threading.Thread(target=self._run, name="memory-alarm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()
        self._thread.join(_ANSWERS)

    def plan(self, question: Question) -> None:
        """Notes what was planned, for reports; weights are loaded next."""
        self._question, self._phase = question, "loading"
        records.write(f"question-{self._world.rank}.json", question.to_json())

    def enter(self, phase: str) -> None:
        """Notes the phase of the run by the planner's name, for reports."""
        self._phase = phase

    def handle(self, error: BaseException) -> None:
        """Ends all ranks if `error` means that memory ran out; else returns.

        Raises:
            OutOfMemory: where this is the only rank.
        """
        memory = self._memory()
        cause = cause_of(error, memory.free, memory.total)
        if cause is not None:
            self._fail(cause, self._world.rank)
        elif memory.free is not None and memory.total is not None and cause_of(error) is not None:
            _log.error(sticky_note(memory.free, memory.total))

    def lost(self, rank: int | None) -> None:
        """Ends all ranks if the lost one was killed for its memory, or another rank has given the alarm; else returns
        after a few seconds."""
        if self._cgroup is not None and self._cgroup.oom_kills() > self._kills:
            who = "a rank" if rank is None else f"rank {rank}"
            self._fail(Cause(Kind.CGROUP, f"{who} was killed by the kernel for the memory limit"), rank)
        with suppress(RuntimeError):  # the store went with its node
            if _wait(_ANSWERS, lambda: self._store is not None and self._store.check([_ALARM])):
                self._follow()

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone, and with it the job
            while not self._closed.wait(_INTERVAL):
                memory = self._memory().to_json()
                records.write(f"memory-{self._world.rank}.json", memory)
                if self._store is not None:
                    self._store.set(_key(self._world.rank), json.dumps(memory))
                    if self._store.check([_ALARM]):
                        self._follow()

    def _fail(self, cause: Cause, rank: int | None) -> NoReturn:
        """Gives the alarm, makes the report, and ends."""
        with self._lock:
            if self._store is None:
                raise OutOfMemory(self._tell(cause, rank))
            try:
                first = own = {"rank": rank, "message": cause.message, "by": self._world.rank}
                with suppress(RuntimeError):  # the store is gone: the ranks that are left report each for itself
                    first = json.loads(self._store.compare_set(_ALARM, "", json.dumps(own)).decode())
                if first["by"] != self._world.rank:
                    self._end(first)
                print(self._tell(cause, rank), file=sys.stderr, flush=True)
                self._store.set(_TOLD, "1")
            finally:  # whatever fails here, the ranks must end
                _leave(cause.message)

    def _tell(self, cause: Cause, rank: int | None) -> str:
        """Makes the report, and leaves it where it is looked for; returns what this rank is to print."""
        made = self._report(cause, rank)
        report.write(Path(self._config.output_dir), made)
        if records.folder() is not None:  # the launcher prints it once
            return cause.message
        report.write_termination({"exit_code": int(ExitCode.OUT_OF_MEMORY), "reason": "out_of_memory", **made})
        return report.text_of(made)

    def _follow(self) -> NoReturn:
        """Ends after the alarm of another rank."""
        with self._lock:
            assert self._store is not None
            alarm = self._store.get(_ALARM)
            self._end(json.loads(alarm.decode()))

    def _end(self, alarm: dict[str, Any]) -> NoReturn:
        store = self._store
        assert store is not None
        with suppress(Exception):  # whatever fails here, the rank must end
            store.set(_key(self._world.rank, fresh=True), json.dumps(self._memory().to_json()))
            _wait(_REPORT, lambda: store.check([_TOLD]))
        _leave(f"memory ran out on rank {alarm['rank']}: {alarm['message']}")

    def _report(self, cause: Cause, rank: int | None) -> dict[str, Any]:
        found = {self._world.rank: self._memory()}
        store = self._store
        if store is not None:
            others = [other for other in range(self._world.size) if other not in (self._world.rank, rank)]
            with suppress(RuntimeError):
                _wait(_ANSWERS, lambda: all(store.check([_key(other, fresh=True)]) for other in others))
                for other in range(self._world.size):
                    for key in (_key(other, fresh=True), _key(other)):
                        if other not in found and store.check([key]):
                            found[other] = RankMemory.from_json(json.loads(store.get(key).decode()))
        command = Command(*_started(), self._config.output_dir)
        ranks = [found[other] for other in sorted(found)]
        return OomReport(cause.kind, cause.message, rank, command, ranks, self._question, limit_bytes()).to_json()

    def _memory(self) -> RankMemory:
        rank, resident, limit = self._world.rank, resident_bytes(), limit_bytes()
        device = self._world.device
        if device.type != "cuda" or not torch.cuda.is_initialized():
            return RankMemory(rank, self._phase, resident, limit)
        try:
            free, total = torch.cuda.mem_get_info(device)
        except RuntimeError:  # the context is broken; what torch holds is known all the same
            free, total = 0, 0
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return RankMemory(rank, self._phase, resident, limit, allocated, reserved, total, free)


def _key(rank: int, *, fresh: bool = False) -> str:
    """Where a rank's memory is in the store: as it last was, or as it was when the alarm came."""
    return f"wandistill/memory/{'alarm/' if fresh else ''}{rank}"


def _wait(seconds: float, done: Callable[[], bool]) -> bool:
    """Waits until `done`; returns whether it is. Not the store's own wait, which keeps others from the connection."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _leave(message: str) -> NoReturn:
    records.leave(ExitCode.OUT_OF_MEMORY, message)
    records.end_process(ExitCode.OUT_OF_MEMORY)


def _started() -> tuple[list[str], list[str]]:
    """How this run was started: what stands before its flags, and the flags."""
    flags = sys.argv[1:]
    if flags[:1] in (["train"], ["prepare"]):
        return ["wandistill", flags[0]], flags[1:]
    if records.COMMAND in os.environ:
        return shlex.split(os.environ[records.COMMAND]), flags
    start = ["torchrun", f"--nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE', '1')}"]
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    if nodes != "1":
        place = {"nnodes": nodes, "node_rank": os.environ["GROUP_RANK"], "master_addr": os.environ["MASTER_ADDR"]}
        start += [f"--{name}={value}" for name, value in place.items()]
    return [*start, "-m", "wandistill.train"], flags
