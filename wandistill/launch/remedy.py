"""What would make a run fit whose memory ran out: for people as advice, for the launcher as the next placement.

The plan said that the run fits, and it did not. So in the planner's own measure there is less memory than it predicted
for this run, and what is looked for must stay below that, by the margin. Nothing is told that was not tried there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wandistill.config import FIELDS
from wandistill.launch.causes import Kind
from wandistill.launch.flags import shown, with_settings
from wandistill.launch.memory import RankMemory
from wandistill.planner.advice import advise, setting_changes
from wandistill.planner.measured import room_on_gpu
from wandistill.planner.placements import AUTO, Placement
from wandistill.planner.plan import Plan, Row, plan
from wandistill.planner.request import PlanRequest

_MOST = 6
# What replanning may change: none of these moves a result, nor the global batch.
REPLANNED = (
    "teacher_device_strategy",
    "max_memory",
    "resident_blocks",
    "gradient_checkpointing",
    "batch_size",
    "gradient_accumulation_steps",
)
# The planner's names for settings that `wandistill train` calls otherwise.
_NAMES = {"placement": "teacher_device_strategy", "student_name": "student_config"}


@dataclass(frozen=True)
class Remedy:
    """Settings with which the run fits."""

    changes: Mapping[str, object]  # of `wandistill train`, by name
    why: str
    row: Row  # what the plan then says of the placement
    freed: int  # bytes that the fullest rank, or the node, needs less

    @property
    def keeps_run(self) -> bool:
        """Whether the run goes on from its checkpoint; else it begins anew, elsewhere."""
        return not any(FIELDS[name].metadata["identity"] or name == "student_config" for name in self.changes)

    def flags(self, flags: Sequence[str], output_dir: str) -> list[str]:
        """The flags of the run with the change made."""
        anew = {} if self.keeps_run else {"output_dir": f"{output_dir.rstrip('/')}-anew"}
        return with_settings(flags, {**self.changes, **anew})

    def to_json(self, command: Sequence[str], flags: Sequence[str], output_dir: str, device: bool) -> dict[str, Any]:
        """As reports hold it; `command` is what stands before the flags."""
        assert self.row.node is not None
        return {
            "changes": dict(self.changes),
            "why": self.why,
            "placement": self.row.placement.value,
            "freed_bytes": self.freed,
            "needed_bytes": self.row.peak if device else self.row.node.host.peak,
            "continues": self.keeps_run,
            "command": shown([*command, *self.flags(flags, output_dir)]),
        }


def on_device(kind: Kind, request: PlanRequest) -> bool:
    """Whether it is a GPU's memory that ran out, not the node's."""
    return kind is Kind.CUDA and request.on_gpu


def peak_of(row: Row, device: bool) -> int:
    """Bytes of the fullest GPU, or of the node."""
    if device:
        return row.peak
    return row.node.host.peak if row.node else 0


def measured_limit(request: PlanRequest, kind: Kind, node: int | None, failed: RankMemory | None) -> int | None:
    """Bytes of the memory that ran out, as they are now: other processes may have taken of it since the plan.

    Args:
        node: the limit of the node's memory.
        failed: what the rank had that ran out of it; None where it is not known which.
    """
    if not on_device(kind, request):
        return node
    # Where the driver did not answer any more, the total is 0.
    if failed is None or not failed.total or failed.free is None or failed.reserved is None:
        return None
    return room_on_gpu(failed.free, failed.reserved, request.machines.world)


def without_room(request: PlanRequest, kind: Kind, limit: int | None = None) -> PlanRequest:
    """The request on machines with less memory than the plan predicted for it.

    Args:
        request: of the run as it was placed.
        limit: `measured_limit`.
    """
    row = plan(request).row(Placement(request.placement))
    device = on_device(kind, request)
    there = request.machines.device_memory if device else request.machines.host_memory
    most = min(there, peak_of(row, device) - 1, limit or there)
    if device:
        # As many blocks as were kept before are not to be kept again.
        return request.change(resident_blocks=None).change_machines(gpu_memory=most)
    return request.change_machines(host_memory=most)


def remedies(request: PlanRequest, kind: Kind, limit: int | None = None) -> list[Remedy]:
    """What makes it fit, the cheapest first: another placement, then one other setting, then as few as are enough.

    Args:
        limit: `measured_limit`.
    """
    lacking = without_room(request, kind, limit)
    device = on_device(kind, request)
    before = peak_of(plan(request).row(Placement(request.placement)), device)
    found = [*_placements(lacking, before, device), *_settings(lacking, before, device)]
    if not found:
        found = list(_several(lacking, before, device))
    return sorted(found, key=lambda remedy: not remedy.keeps_run)[:_MOST]


def replacement(
    request: PlanRequest, kind: Kind, tried: Sequence[Mapping[str, object]], limit: int | None = None
) -> Remedy | None:
    """The next placement to try; with checkpointing or smaller micro-batches only where none fits without.

    Args:
        request: of the run as it was placed last.
        tried: changes of the user's command that were tried before, the last one with `request`.
        limit: `measured_limit`.
    """
    lacking = without_room(request, kind, limit)
    device = on_device(kind, request)
    before = peak_of(plan(request).row(Placement(request.placement)), device)
    if lacking.teacher_rank_trains == "auto":  # a rank that does not train has no share of the global batch
        lacking = lacking.change(teacher_rank_trains="yes")
    for smaller in _smaller(lacking):
        for remedy in _placements(smaller, before, device, origin=lacking):
            changes = {**(tried[-1] if tried else {}), **remedy.changes}
            if changes not in tried:
                return replace(remedy, changes=changes)
    return None


def _smaller(request: PlanRequest) -> Iterator[PlanRequest]:
    """The request with less and less memory for activations, and the same global batch."""
    while True:
        yield request
        if not request.gradient_checkpointing:
            yield request.change(gradient_checkpointing=True)
        if request.batch_size % 2:
            return
        twice = 2 * request.gradient_accumulation_steps
        request = request.change(batch_size=request.batch_size // 2, gradient_accumulation_steps=twice)


def _placements(request: PlanRequest, before: int, device: bool, origin: PlanRequest | None = None) -> list[Remedy]:
    """Every placement that fits, the fastest first; `origin` is the request without the settings changed so far."""
    also = _differences(origin, request) if origin else {}
    rows = [row for row in plan(request.change(placement=AUTO)).rows if row.within_margin and row.time]
    rows.sort(key=lambda row: -row.time.samples_per_second if row.time else 0.0)
    found = []
    for row in rows:
        settings = {name: value for name, value in row.settings.items() if name in REPLANNED}
        changes = {"teacher_device_strategy": row.placement.value, **settings, **also}
        why = "the teacher elsewhere" if row.placement.value != request.placement else "the same placement"
        found.append(Remedy(changes, why, row, max(before - peak_of(row, device), 0)))
    return found


def _settings(request: PlanRequest, before: int, device: bool) -> Iterator[Remedy]:
    """Each single setting that is enough where the teacher stays where it is."""
    for change in setting_changes(request):
        if "placement" in change.settings:
            continue
        row = plan(change.apply(request)).row(Placement(request.placement))
        if row.within_margin:
            changes = _named(change.settings)
            yield Remedy(changes, change.why, row, max(before - peak_of(row, device), 0))


def _several(request: PlanRequest, before: int, device: bool) -> Iterator[Remedy]:
    """As few settings together as are enough, on the same machines."""
    answer: Plan = plan(request.change(placement=AUTO))
    for advice in advise(answer):
        if any(change.machines for change in advice.changes):
            continue
        settings = {name: value for change in advice.changes for name, value in change.settings.items()}
        changes = _named(settings) | {"teacher_device_strategy": advice.row.placement.value}
        why = "; ".join(change.why for change in advice.changes)
        yield Remedy(changes, why, advice.row, max(before - peak_of(advice.row, device), 0))


def _named(settings: Mapping[str, object]) -> dict[str, object]:
    """Settings by the names of `wandistill train`; the student's shape goes with its name."""
    return {_NAMES.get(name, name): value for name, value in settings.items() if name != "student"}


def _differences(before: PlanRequest, after: PlanRequest) -> dict[str, object]:
    return {
        name: getattr(after, name)
        for name in REPLANNED
        if hasattr(after, name) and getattr(after, name) != getattr(before, name)
    }
