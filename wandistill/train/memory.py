"""What a rank's memory holds while a run is under way, beside what the plan said before it began."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from wandistill.launch.cgroup import MemoryCgroup
from wandistill.models.held import plain_tensors
from wandistill.planner.decide import Decision
from wandistill.planner.outcome import HostUse, RankUse, planned_rank, profile, side_by_side
from wandistill.train.distributed import World
from wandistill.train.record import RunRecord, write_json
from wandistill.train.student import TrainedStudent

PROFILE_FILE = "memory_profile.json"
# Seconds between two looks at the host's memory, and events that torch's snapshot holds.
_INTERVAL = 0.2
_EVENTS = 200_000
# Steps at the begin that say nothing of the others.
_WARM_UP = 2


def host_memory() -> HostUse:
    """Of this process, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    private, shared = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    return HostUse(private, shared)


class MemoryAccount:
    """Keeps this rank's peaks, and puts those of all ranks beside the plan.

    Torch counts what it allocates on a GPU; host memory has no peak without mapped files, so a thread looks at it.

    Args:
        decision: the plan.
        detailed: also keep the peak of each phase (`--memory_profile`).
        on_phase: told each phase that begins.
    """

    def __init__(
        self, world: World, decision: Decision, *, detailed: bool, on_phase: Callable[[str], None] = lambda name: None
    ) -> None:
        self._world, self._decision, self.detailed = world, decision, detailed
        self._on_phase = on_phase
        self._on_gpu = world.device.type == "cuda"
        self._phase = ""  # the last that began
        self._host: dict[str, HostUse] = {}
        self._gpu_peak = 0
        self._phases: dict[str, int] = {}
        self._steps: list[float] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="host memory", daemon=True)

    def __enter__(self) -> MemoryAccount:
        self._thread.start()
        if self.detailed and self._on_gpu:
            # Stacks of allocations only: the one of a free is taken while an exception, such as the one that ends the
            # second run of a checkpointed block, unwinds the frames that held the tensor, and makes that fail.
            torch.cuda.memory._record_memory_history(context="alloc", max_entries=_EVENTS)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            phase, now = self._phase, host_memory()
            # Both as they were at one time: private and shared memory have their peaks at different ones.
            self._host[phase] = max(self._host.get(phase, now), now, key=lambda use: use.total)
            if self._done.wait(_INTERVAL):
                return

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the body as phase `name` of the plan; phases do not nest."""
        self._on_phase(name)
        self._phase = name
        if not (self.detailed and self._on_gpu):
            yield
            return
        self.gpu_peak()
        torch.cuda.reset_peak_memory_stats()
        yield
        self._phases[name] = max(self._phases.get(name, 0), torch.cuda.max_memory_allocated())

    def gpu_peak(self) -> int:
        """The most bytes that torch had allocated on the GPU so far."""
        if self._on_gpu:
            self._gpu_peak = max(self._gpu_peak, torch.cuda.max_memory_allocated())
        return self._gpu_peak

    def beside_plan(self) -> dict[str, float]:
        """What `wandistill status` shows of this rank's GPU and of its pod: bytes so far, and those of the plan."""
        found: dict[str, float] = {}
        planned = planned_rank(self._decision, self._world.rank)
        if self._on_gpu and planned is not None:
            found |= {"gpu_bytes": self.gpu_peak(), "gpu_planned_bytes": planned.peak_allocated}
        group, node = MemoryCgroup.own(), self._decision.row.node
        limit = group.tightest() if group else None
        if limit is not None and node is not None:
            found |= {"pod_bytes": limit.used, "pod_planned_bytes": node.host.peak, "pod_limit_bytes": limit.limit}
        return found

    def step(self, seconds: float) -> None:
        """Counts a step."""
        self._steps.append(seconds)

    def write(self, record: RunRecord, student: TrainedStudent) -> None:
        """Puts plan and measurement into run.json, and the profile beside it; all ranks call this together."""
        uses = self._world.gather(self._use(student))
        if self.detailed and self._on_gpu:
            file = record.path.with_name(f"memory_snapshot-rank-{self._world.job_rank}.pickle")
            torch.cuda.memory._dump_snapshot(str(file))
        if not self._world.is_main:
            return
        taken = self._steps[_WARM_UP:] or self._steps
        seconds = statistics.median(taken) if taken else None
        record.update(memory=side_by_side(self._decision, uses, seconds))
        if self.detailed:
            write_json(record.path.with_name(PROFILE_FILE), profile(self._decision, uses))

    def _use(self, student: TrainedStudent) -> RankUse:
        process = 0
        if self._on_gpu:
            free, total = torch.cuda.mem_get_info()
            process = total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()
        terms = _terms(student, self._world.device) if self.detailed else {}
        return RankUse(
            rank=self._world.job_rank,
            node=self._world.node,
            gpu_allocated=self.gpu_peak(),
            gpu_process=process,
            host=dict(self._host),
            phases=self._phases,
            terms=terms,
        )


def _terms(student: TrainedStudent, device: torch.device) -> dict[str, int]:
    """Bytes of what lasts on `device`, by the planner's names."""
    parameters = list(student.module.parameters())
    moments = [value for state in student.optimizer.state.values() for key, value in state.items() if key != "step"]
    average = list(student.average.weights.values()) if student.average is not None else []
    found = {"student weights": parameters, "student moments": moments, "student average": average}
    return {name: sum(_bytes(tensor, device) for tensor in tensors) for name, tensors in found.items()}


def _bytes(tensor: object, device: torch.device) -> int:
    """Bytes of a tensor on `device`."""
    plain = plain_tensors(tensor) if isinstance(tensor, Tensor) else ()
    return sum(part.nbytes for part in plain if part.device == device)
