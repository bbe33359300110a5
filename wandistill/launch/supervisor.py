"""One try of a node's ranks: starts torchrun, passes signals to the ranks, watches the memory limit, tells the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from wandistill.launch import records
from wandistill.launch.cgroup import MemoryCgroup
from wandistill.launch.ending import Ending, Evidence, ending_of
from wandistill.launch.node import OPERATORS, Node

_INTERVAL = 0.1
# Ranks that have not begun by then, because other nodes are missing, will not.
_BEGINNING = 10.0
_STOPPING = (signal.SIGTERM, signal.SIGINT)


class Supervisor:
    """Starts a node's ranks and waits for their end.

    SIGTERM and SIGINT go to the ranks alone, which save and end. torchrun would kill them 30 seconds after it got one.

    Args:
        command: torchrun with its flags and the ranks' program.
        stop_share: share of the memory limit at which the ranks are killed, before the kernel kills one or all.
        on_tick: called ten times a second with the folder that the ranks write into.
    """

    def __init__(
        self,
        command: Sequence[str],
        node: Node,
        environment: Mapping[str, str],
        *,
        stop_share: float = 1.0,
        on_tick: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        self._command, self._node, self._environment = command, node, environment
        self._stop_share, self._on_tick = stop_share, on_tick
        self._cgroup = MemoryCgroup.own()
        self._signals: list[int] = []
        self._told: dict[int, int] = {}  # rank -> how many of the signals it got
        self._stopped_at_limit = False
        self.folder = Path(tempfile.mkdtemp(prefix="wandistill-launch-"))

    def run(self) -> Ending:
        """Runs the ranks to their end."""
        kills = self._cgroup.oom_kills() if self._cgroup else 0
        former = {number: signal.signal(number, self._note) for number in _STOPPING}
        # A session of its own: a Ctrl-C on the terminal comes to the ranks through this process alone.
        process = subprocess.Popen(self._command, env=self._ranks_environment(), start_new_session=True)
        try:
            began = time.monotonic()
            while process.poll() is None:
                if self._signals:
                    self._pass_signals(process, waited=time.monotonic() - began)
                self._hold_limit()
                self._on_tick(self.folder)
                time.sleep(_INTERVAL)
        except BaseException:
            _kill(process.pid, signal.SIGTERM)
            raise
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
        self._end_orphans()
        return ending_of(
            Evidence(
                process.returncode,
                records.exits(self.folder),
                records.failures(self.folder),
                (self._cgroup.oom_kills() - kills) if self._cgroup else 0,
                self._stopped_at_limit,
                self._signals[0] if self._signals else None,
                self._node.nodes,
            )
        )

    @property
    def stopped(self) -> bool:
        """Whether a signal told this process to end."""
        return bool(self._signals)

    def close(self) -> None:
        """Removes the folder that the ranks wrote into."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ranks_environment(self) -> dict[str, str]:
        """Without what the operator says of the node, which torchrun would take for flags, and ranks for theirs."""
        kept = {
            name: value
            for name, value in self._environment.items()
            if name not in OPERATORS and not name.startswith("PET_")
        }
        return {**kept, records.FOLDER: str(self.folder)}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _pass_signals(self, process: subprocess.Popen[Any], *, waited: float) -> None:
        pids, ended = records.pids(self.folder), records.exits(self.folder)
        for rank, pid in pids.items():
            for number in self._signals[self._told.get(rank, 0) :]:
                if rank not in ended:
                    _kill(pid, number)
            self._told[rank] = len(self._signals)
        if not pids and waited > _BEGINNING:
            _kill(process.pid, signal.SIGTERM)

    def _end_orphans(self) -> None:
        """Kills ranks that outlived torchrun, which the kernel may kill like any other."""
        for pid in records.pids(self.folder).values():
            with suppress(OSError):
                if str(self.folder).encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    _kill(pid, signal.SIGKILL)

    def _hold_limit(self) -> None:
        """Kills the ranks where their cgroup is full; the last checkpoint is what is left of them."""
        limit = self._cgroup.tightest() if self._cgroup and self._stop_share < 1 else None
        if limit is None or self._stopped_at_limit or limit.used < self._stop_share * limit.limit:
            return
        self._stopped_at_limit = True
        for pid in records.pids(self.folder).values():
            _kill(pid, signal.SIGKILL)


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
