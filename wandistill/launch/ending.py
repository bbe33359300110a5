"""From what is known of the ranks' ends to the launcher's exit code. torchrun alone returns 1 for everything."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from wandistill.errors import ExitCode
from wandistill.launch.records import ExitRecord, Failure


class Shortage(str, Enum):
    """Memory that ran out, as far as only the launcher can see it."""

    KERNEL = "the kernel killed it for the memory limit"
    STOPPED = "stopped before the memory limit was hit"
    MAPPED = "a page of mapped memory could not be had: /dev/shm or the disk below a mapped file is full"


@dataclass(frozen=True)
class Evidence:
    """What is known when all ranks of a node are gone."""

    torchrun: int  # its exit code
    exits: Mapping[int, ExitRecord]
    failures: Mapping[int, Failure]
    oom_kills: int = 0  # by the kernel in this cgroup since the start
    stopped_at_limit: bool = False  # the launcher killed the ranks before the kernel would
    signal: int | None = None  # that the launcher was told to stop with
    nodes: int = 1


@dataclass(frozen=True)
class Ending:
    """How a try ended."""

    code: ExitCode
    message: str
    rank: int | None = None  # that it began with
    shortage: Shortage | None = None


# Of several ranks that ended in their own ways the first here is the cause, and the others' ends follow from it.
_CAUSES = (
    ExitCode.OUT_OF_MEMORY,
    ExitCode.TRAINING_FAILED,
    ExitCode.BAD_CONFIG,
    ExitCode.UNEXPECTED,
)
_SHARED = (ExitCode.TERMINATED, ExitCode.INTERRUPTED)
_STOPPING = {signal.SIGTERM: ExitCode.TERMINATED, signal.SIGINT: ExitCode.INTERRUPTED}


def ending_of(evidence: Evidence) -> Ending:
    """How the try ended."""
    done = {rank for rank, record in evidence.exits.items() if record.code == ExitCode.DONE}
    if evidence.torchrun == 0 or (evidence.failures and set(evidence.failures) <= done):
        return Ending(ExitCode.DONE, "done")  # also where a rank crashed after it was
    if evidence.stopped_at_limit:
        return Ending(ExitCode.OUT_OF_MEMORY, Shortage.STOPPED.value, None, Shortage.STOPPED)
    if evidence.torchrun == -signal.SIGKILL and evidence.oom_kills:
        return Ending(ExitCode.OUT_OF_MEMORY, f"torchrun: {Shortage.KERNEL.value}", None, Shortage.KERNEL)
    killed = _first_killed(evidence)
    if killed is not None and evidence.failures[killed].code == -signal.SIGKILL and evidence.oom_kills:
        return Ending(ExitCode.OUT_OF_MEMORY, f"rank {killed}: {Shortage.KERNEL.value}", killed, Shortage.KERNEL)
    for code in _CAUSES:
        for record in sorted(evidence.exits.values(), key=lambda record: record.rank):
            if record.code == code:
                return Ending(code, record.message, record.rank)
    if killed is not None:
        return _killed(killed, -evidence.failures[killed].code)
    codes = {record.code for record in evidence.exits.values()}
    for code in _SHARED:
        if code in codes:
            return Ending(code, next(record.message for record in evidence.exits.values() if record.code == code))
    if evidence.signal is not None:
        return Ending(_STOPPING[signal.Signals(evidence.signal)], "stopped before there was anything new to save")
    for record in evidence.exits.values():
        if record.code == ExitCode.PEER_LOST:
            return Ending(ExitCode.PEER_LOST, record.message)
    if evidence.nodes > 1:
        return Ending(ExitCode.PEER_LOST, "torchrun ended before its ranks did: the other nodes could not be reached")
    return Ending(ExitCode.UNEXPECTED, f"torchrun ended with {evidence.torchrun}, and no rank told why")


def _first_killed(evidence: Evidence) -> int | None:
    """The rank that was killed by a signal before anything else went wrong. Those that torchrun ends follow it."""
    first = min(evidence.failures, key=lambda rank: evidence.failures[rank].time, default=None)
    if first is None or first in evidence.exits or evidence.failures[first].code >= 0:
        return None
    stopped = evidence.signal is not None and -evidence.failures[first].code in (signal.SIGTERM, signal.SIGINT)
    return None if stopped else first


def _killed(rank: int, number: int) -> Ending:
    name = signal.Signals(number).name
    if number == signal.SIGBUS:
        return Ending(ExitCode.OUT_OF_MEMORY, f"rank {rank}: {Shortage.MAPPED.value}", rank, Shortage.MAPPED)
    if number in (signal.SIGKILL, signal.SIGTERM):
        return Ending(ExitCode.PEER_LOST, f"rank {rank} was killed from outside, by {name}", rank)
    return Ending(ExitCode.UNEXPECTED, f"rank {rank} crashed with {name}", rank)
