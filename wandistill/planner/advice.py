"""What would make a run fit, or faster: changes of its settings, each tried in the planner before it is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from wandistill.catalog import gpus
from wandistill.errors import ConfigError
from wandistill.planner.placements import AUTO, Placement
from wandistill.planner.plan import HOST, Plan, Row, plan
from wandistill.planner.request import PlanRequest
from wandistill.student_config import NAMES, student_spec
from wandistill.units import GIB, format_bytes

# More changes at once than this are no advice any more.
_MOST_CHANGES = 4
_MOST_ITEMS = 6
_MOST_GPUS = 8
# A change is told as an improvement from this factor of samples a second on.
_WORTH = 1.2


@dataclass(frozen=True)
class Change:
    """One setting to change."""

    flags: str  # as they are written, such as --optimizer adamw8bit
    why: str
    settings: Mapping[str, object] = field(default_factory=dict)  # fields of the request
    machines: Mapping[str, object] = field(default_factory=dict)  # fields of its machines

    def apply(self, request: PlanRequest) -> PlanRequest:
        """`request` with the change made."""
        return request.change(**self.settings).change_machines(**self.machines)

    @property
    def kind(self) -> str:
        """The flag, whatever its value."""
        return self.flags.split()[0]


@dataclass(frozen=True)
class Advice:
    """Changes that together make the run fit."""

    changes: tuple[Change, ...]
    plan: Plan  # with the changes made

    @property
    def flags(self) -> str:
        """All flags."""
        return " ".join(change.flags for change in self.changes)

    @property
    def row(self) -> Row:
        """What the changed plan chooses."""
        assert self.plan.choice is not None
        return self.plan.choice

    @property
    def speed(self) -> float:
        """Samples a second of the chosen placement."""
        return self.row.time.samples_per_second if self.row.time else 0.0

    def freed(self, before: Plan) -> int:
        """Bytes that the chosen placement's fullest rank needs less with the changes made."""
        return max(before.row(self.row.placement).peak - self.row.peak, 0)

    def to_json(self, before: Plan) -> dict[str, object]:
        """As JSON."""
        return {
            "flags": self.flags,
            "why": "; ".join(change.why for change in self.changes),
            "placement": self.row.placement.value,
            "freed_bytes": self.freed(before),
            "peak_bytes": self.row.peak,
            "samples_per_second": self.speed,
        }


def advise(before: Plan) -> list[Advice]:
    """What makes a plan without a choice fit: the fewest changes of settings, then other machines or students.

    Changes are ordered by what they cost: those that only move things come first, then those that take time, then
    those of precision. Only what was tried in the planner and fits is told, and nothing that holds a shorter advice.
    """
    return list(_advise(before))[:_MOST_ITEMS]


def _advise(before: Plan) -> Iterator[Advice]:
    request = before.request
    settings = setting_changes(request)
    told: list[frozenset[str]] = []
    for count in range(1, _MOST_CHANGES + 1):
        found = [advice for chosen in combinations(settings, count) if (advice := _tried(request, chosen, told))]
        yield from found
        told += [frozenset(change.flags for change in advice.changes) for advice in found]
        if found:
            break
    enough: set[str] = set()
    # Where one setting is enough, a larger machine is of interest only if it leaves all of them as they are.
    most = 1 if told and min(map(len, told)) == 1 else _MOST_CHANGES - 1
    for change in larger_changes(before):
        if change.kind in enough:
            continue
        settings = setting_changes(change.apply(request))
        # The fewest changes of settings with which this machine is enough, and of these the fastest.
        for also in range(most):
            tried = (_tried(request, (change, *chosen), told) for chosen in combinations(settings, also))
            options = [option for option in tried if option is not None]
            if options:
                yield max(options, key=lambda option: option.speed)
                enough.add(change.kind)
                break


def _tried(request: PlanRequest, changes: tuple[Change, ...], told: list[frozenset[str]]) -> Advice | None:
    names = frozenset(change.flags for change in changes)
    if any(known <= names for known in told) or _conflict(changes):
        return None
    changed = request
    for change in changes:
        changed = change.apply(changed)
    answer = plan(changed)
    return Advice(changes, answer) if answer.choice is not None else None


def _conflict(changes: tuple[Change, ...]) -> bool:
    """Two values of one flag."""
    names = [change.kind for change in changes]
    return len(set(names)) != len(names)


def improve(before: Plan) -> Advice | None:
    """The single change of settings after which a faster placement fits, if it is worth one.

    Of several the cheapest that is at least half as fast as the fastest.
    """
    chosen = before.choice
    assert chosen is not None
    if before.request.placement != AUTO or chosen.time is None:
        return None
    least = _WORTH * chosen.time.samples_per_second
    found = []
    for change in setting_changes(before.request):
        answer = plan(change.apply(before.request))
        if answer.choice is not None and answer.choice.placement is not chosen.placement:
            found.append(Advice((change,), answer))
    fastest = max((advice.speed for advice in found), default=0.0)
    return next((advice for advice in found if advice.speed >= max(least, fastest / 2)), None)


def setting_changes(request: PlanRequest) -> list[Change]:
    """Changes of settings that lower memory, the cheapest first."""
    changes = []
    if request.placement != AUTO:
        changes += [
            Change(f"--teacher_device_strategy {name}", "the teacher elsewhere", {"placement": name})
            for name in (placement.value for placement in Placement)
            if name != request.placement
        ]
    if request.ema_device == "gpu":
        changes.append(Change("--ema_device cpu", "the average in host memory", {"ema_device": "cpu"}))
    if request.student_parallel == "ddp" and request.machines.world > 1:
        why = f"the student spread over {request.machines.world} ranks"
        changes.append(Change("--student_parallel fsdp", why, {"student_parallel": "fsdp"}))
    if not request.gradient_checkpointing:
        why = "the student's blocks recomputed in backward"
        changes.append(Change("--gradient_checkpointing", why, {"gradient_checkpointing": True}))
    if request.batch_size > 1 and request.batch_size % 2 == 0:
        half, twice = request.batch_size // 2, 2 * request.gradient_accumulation_steps
        flags = f"--batch_size {half} --gradient_accumulation_steps {twice}"
        values = {"batch_size": half, "gradient_accumulation_steps": twice}
        changes.append(Change(flags, "smaller micro-batches, the same global batch", values))
    if request.teacher_dtype == "float32":
        changes.append(Change("--teacher_dtype bfloat16", "the teacher in half", {"teacher_dtype": "bfloat16"}))
    if request.teacher_dtype not in ("int8", "float8"):
        changes.append(Change("--teacher_dtype int8", "the teacher in 8 bits", {"teacher_dtype": "int8"}))
    if request.optimizer == "adamw":
        why = "the student's weights, gradients and moments in bfloat16"
        changes.append(Change("--optimizer adamw_bf16", why, {"optimizer": "adamw_bf16"}))
    if request.optimizer != "adamw8bit":
        why = "the student's weights and gradients in bfloat16, its moments in 8 bits"
        changes.append(Change("--optimizer adamw8bit", why, {"optimizer": "adamw8bit"}))
    return changes


def larger_changes(before: Plan) -> list[Change]:
    """More or larger machines, the smallest step first, host memory only where it lacks; or a smaller student."""
    request, machines = before.request, before.request.machines
    changes = []
    for count in (2 * machines.ranks, 4 * machines.ranks, 8 * machines.ranks) if machines.gpu else ():
        if count <= _MOST_GPUS:
            changes.append(Change(f"--gpus {count}", f"{count} GPUs on a node", machines={"ranks": count}))
    if machines.gpu is not None and machines.gpu_memory is None:
        usable = machines.gpu.usable
        for gpu in sorted((gpu for gpu in gpus().values() if gpu.usable > usable), key=lambda gpu: gpu.usable):
            change = Change(f"--gpu {gpu.name}", gpu.title, machines={"gpu": gpu})
            if plan(change.apply(request)).choice is not None:
                changes.append(change)
                break
    if any(row.lack is not None and row.lack.where == HOST for row in before.rows):
        for memory in (2 * machines.host_memory, 4 * machines.host_memory):
            why = f"{format_bytes(memory)} of host memory"
            changes.append(Change(f"--host_memory {memory // GIB}GiB", why, machines={"host_memory": memory}))
    for name in NAMES:
        with contextlib.suppress(ConfigError):  # a small teacher has no student of that name
            spec = student_spec(name, request.model.architecture)
            size = spec.architecture.parameters
            if size < request.student.parameters:
                values = {"student": spec.architecture, "student_name": name}
                changes.append(Change(f"--student {name}", f"a student of {size / 1e9:.1f} B parameters", values))
    return changes
