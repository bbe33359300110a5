"""All tries of a run on one node: starts the ranks, reports what ended them, and starts again where that may help."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from wandistill.config import TrainConfig
from wandistill.errors import DoesNotFit, ExitCode, TrainingFailed, WandistillError
from wandistill.launch import lock, records, report, state
from wandistill.launch.causes import Kind
from wandistill.launch.ending import Ending, Shortage
from wandistill.launch.forecast import check_fit
from wandistill.launch.memory import RankMemory, limit_bytes, resident_bytes
from wandistill.launch.metrics import LauncherMetrics, last_figures
from wandistill.launch.node import Node
from wandistill.launch.question import Question
from wandistill.launch.remedy import REPLANNED, measured_limit, replacement
from wandistill.launch.report import Command, OomReport
from wandistill.launch.supervisor import Supervisor

# Seconds between two notes of the ranks' memory.
_NOTE_SECONDS = 2.0
# Tries in a row without a new checkpoint after which another is of no use, unless the user says otherwise.
MOST_IDLE = 5
_KINDS = {Shortage.KERNEL: Kind.CGROUP, Shortage.STOPPED: Kind.CGROUP, Shortage.MAPPED: Kind.SHM}
# Ends that ask for another try, and so could for ever.
_RETRIED = (None, int(ExitCode.OUT_OF_MEMORY), int(ExitCode.PEER_LOST))


class Launcher:
    """Runs `wandistill train` on this node's ranks.

    Args:
        flags: of `wandistill train`, as they were given.
        most_idle: tries in a row without a new checkpoint.
        program: what each rank runs, and torchrun before it.
    """

    def __init__(
        self,
        node: Node,
        config: TrainConfig,
        flags: Sequence[str],
        *,
        most_idle: int = MOST_IDLE,
        agent: Sequence[str] = (sys.executable, "-m", "wandistill.train.agent"),
        program: Sequence[str] = ("-m", "wandistill.train"),
    ) -> None:
        self._node, self._config, self._flags = node, config, list(flags)
        self._most_idle, self._agent, self._program = most_idle, agent, program
        self._output = Path(config.output_dir)
        self._file = state.StateFile(self._output, node.number)
        self._try = state.Try(0, time.time(), 0)
        self._noted = 0.0
        self._metrics = LauncherMetrics(config, node.number)
        self._start = ["wandistill", "launch", *node.flags(), "--"]

    def run(self) -> int:
        """Runs the tries; returns the exit code.

        Raises:
            ConfigError: another run writes into the output directory, or it cannot be written.
            TrainingFailed: too many tries have left nothing.
        """
        try:
            # Node 0's speaks for all of the job.
            with lock.held(self._output, "wandistill launch") if self._node.number == 0 else nullcontext():
                return self._run()
        finally:
            self._metrics.close()

    def _run(self) -> int:
        ending = self._killed_before() or self._refused()
        while ending is None:
            if self._node.number > 0 and state.all_steps_taken(self._output):
                ending = Ending(ExitCode.DONE, "every step has been taken; node 0 exports the student")
                break
            supervisor = self._begin()
            try:
                ending = supervisor.run()
                found = self._explain(supervisor, ending)
                if found is not None:  # the others' records say only that they followed
                    ending = dataclasses.replace(ending, rank=found["rank"], message=found["message"])
                kind, phase = (found["kind"], found["phase"] or "") if found is not None else ("", "")
                self._metrics.end_try(ending, kind, phase)
                self._file.write(self._try.end(ending.code, ending.message))
                if found is not None and not supervisor.stopped and self._replan(found):
                    if self._node.nodes > 1:
                        message = "all nodes end, to start again with the new placement"
                        ending = Ending(ExitCode.PEER_LOST, message, ending.rank)
                    else:
                        ending = None
            finally:
                supervisor.close()
        self._tell_end(ending)
        return int(ending.code)

    def _killed_before(self) -> Ending | None:
        """Looks at the try before this start; an ending where it leaves no sense in another one.

        Raises:
            TrainingFailed: too many tries have left nothing.
        """
        last = self._file.last()
        if last is None:
            return None
        self._try = last
        # After the last step a kill has cost nothing, and there is no placement that could do better.
        if last.ended is None and not state.all_steps_taken(self._output):
            message = (
                f"try {last.number} has no end: it was probably killed whole, with its launcher, for the memory limit"
            )
            found = OomReport(
                Kind.CGROUP,
                message,
                None,
                self._command(),
                [RankMemory.from_json(memory) for memory in last.ranks],
                Question.from_json(last.question) if last.question else None,
                last.limit,
            ).to_json()
            self._tell(found)
            self._file.write(last.end(ExitCode.OUT_OF_MEMORY, message))
            self._try = dataclasses.replace(last, code=int(ExitCode.OUT_OF_MEMORY))
            if not self._replan(found):
                return Ending(ExitCode.OUT_OF_MEMORY, message)
        if last.code in _RETRIED and last.idle >= self._most_idle and state.newest_step(self._output) <= last.step:
            raise TrainingFailed(
                f"{last.idle} tries in a row ended without a new checkpoint, the last one with: {last.message}. "
                f"Look at its reason; then remove {self._file.path} to try again."
            )
        return None

    def _refused(self) -> Ending | None:
        """An ending where it is plain already that the run cannot fit, so that no rank starts."""
        try:
            check_fit(self._config, self._node.ranks, self._node.nodes)
        except DoesNotFit as error:
            return Ending(ExitCode.BAD_CONFIG, str(error))
        return None

    def _begin(self) -> Supervisor:
        step = state.newest_step(self._output)
        idle = self._try.idle if self._try.code in _RETRIED and step <= self._try.step else 0
        self._try = state.Try(self._try.number + 1, time.time(), step, idle=idle + 1, limit=limit_bytes())
        self._file.write(self._try)
        # The export needs no peers, and those of other nodes may have ended long ago.
        alone = self._node.nodes > 1 and state.all_steps_taken(self._output)
        node = Node(1) if alone else self._node
        command = [*self._agent, *node.torchrun(), *self._program, *self._flags]
        return Supervisor(
            command,
            node,
            {
                **os.environ,
                records.COMMAND: report.shown(self._start),
                **self._metrics.begin_try(len(state.replans(self._output))),
            },
            stop_share=self._config.host_memory_stop,
            on_tick=self._note,
        )

    def _note(self, folder: Path) -> None:
        """Notes the ranks' memory in the state file now and then, and at once what they have asked the planner: after a
        kill of the whole container, which may come soon, the next start plans from it."""
        news = self._try.question is None and records.read(folder, "question")
        if time.monotonic() - self._noted < _NOTE_SECONDS and not news:
            return
        self._noted = time.monotonic()
        self._try = self._with_memory(folder)
        with suppress(WandistillError):  # a directory that fills up is told by the ranks, which write more into it
            self._file.write(self._try)

    def _with_memory(self, folder: Path) -> state.Try:
        """The try with what its ranks told last, and their host memory as it is now."""
        told = records.read(folder, "memory")
        former = {memory["rank"]: memory for memory in self._try.ranks}
        ranks = []
        for rank, pid in records.pids(folder).items():
            known = former.get(rank) or RankMemory(rank, "start", 0).to_json()
            memory = {**known, **told.get(rank, {})}
            ranks.append({**memory, "host_rss_bytes": resident_bytes(pid) or memory["host_rss_bytes"]})
        question = next(iter(records.read(folder, "question").values()), self._try.question)
        return dataclasses.replace(
            self._try,
            ranks=ranks,
            limit=limit_bytes(),
            question=question,
            placement=question["config"]["teacher_device_strategy"] if question else "",
            phase=ranks[0]["phase"] if ranks else "start",
        )

    def _explain(self, supervisor: Supervisor, ending: Ending) -> dict[str, Any] | None:
        """Tells an out-of-memory; returns its report."""
        if ending.code is not ExitCode.OUT_OF_MEMORY:
            return None
        self._try = self._with_memory(supervisor.folder)
        found = report.read(self._output, self._try.started)
        if found is None:
            # The ranks could not tell: what is left is what they told last.
            found = OomReport(
                _KINDS[ending.shortage] if ending.shortage else Kind.HOST,
                ending.message,
                ending.rank,
                self._command(),
                [RankMemory.from_json(memory) for memory in self._try.ranks],
                Question.from_json(self._try.question) if self._try.question else None,
                self._try.limit,
            ).to_json()
        elif self._is_elsewhere(found["rank"]):
            print(f"wandistill launch: rank {found['rank']} of another node ran out of memory.", file=sys.stderr)
            return found
        self._tell(found)
        return found

    def _is_elsewhere(self, rank: int | None) -> bool:
        """Whether a rank is another node's; how many a node has is its own affair, so only the ranks know it."""
        return rank is not None and rank not in {memory["rank"] for memory in self._try.ranks}

    def _tell(self, found: dict[str, Any]) -> None:
        report.write(self._output, found)
        print(report.text_of(found), file=sys.stderr, flush=True)

    def _replan(self, found: dict[str, Any]) -> bool:
        """Looks for the next placement; returns whether another try is worth it."""
        if self._config.on_oom != "replan":
            return False
        if self._is_elsewhere(found["rank"]):
            return True  # its own launcher decides; a job that cannot go on fails there
        asked = {name: getattr(self._config, name) for name in REPLANNED}
        done = [entry["changes"] for entry in state.replans(self._output) if entry["asked"] == asked]
        if len(done) >= self._config.max_replans:
            _say(f"--max_replans {self._config.max_replans} are used up.")
            return False
        if self._try.question is None:
            return False
        question, kind = Question.from_json(self._try.question), Kind(found["kind"])
        failed = next((RankMemory.from_json(one) for one in found["ranks"] if one["rank"] == found["rank"]), None)
        try:
            request = question.request()
            limit = measured_limit(request, kind, self._try.limit, failed)
            remedy = replacement(request, kind, done, limit)
        except WandistillError as error:
            _say(f"no other placement could be planned: {error}")
            return False
        if remedy is None:
            _say("no other placement fits the measured memory.")
            return False
        state.add_replan(self._output, asked, remedy.changes, found["message"])
        told = " ".join(f"--{name} {value}" for name, value in remedy.changes.items())
        _say(f"--on_oom replan: starting again from the last checkpoint with {told}.")
        return True

    def _command(self) -> Command:
        return Command(self._start, self._flags, str(self._output))

    def _tell_end(self, ending: Ending) -> None:
        """The end in a pod's termination message, and for people where no rank has told it."""
        found = report.read(self._output, self._try.started) if ending.code is ExitCode.OUT_OF_MEMORY else None
        name = ending.code.name.lower()
        report.write_termination(
            {"schema": 1, "exit_code": int(ending.code), "reason": name, "rank": ending.rank, "message": ending.message}
            | last_figures(self._output)
            | ({key: found[key] for key in ("kind", "phase", "term", "ranks", "plan", "advice")} if found else {})
        )
        if ending.code is not ExitCode.DONE:
            _say(f"ended with {int(ending.code)} ({name}): {ending.message}")


def _say(text: str) -> None:
    print(f"wandistill launch: {text}", file=sys.stderr, flush=True)
