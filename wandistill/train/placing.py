"""Settling where the teacher goes, before any weights load: measure, plan, and take what fits or refuse.

Rank 0 decides; the others hold their own settings against the ones that it planned with.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wandistill.catalog import model_from_folder
from wandistill.config import TrainConfig, from_mapping
from wandistill.errors import ConfigError, WandistillError
from wandistill.launch.question import Question
from wandistill.models.wan import WanFolder
from wandistill.planner.decide import Decision, decide, paragraph
from wandistill.planner.fetch import OWN, SPLIT, no_split
from wandistill.planner.from_config import request_of_config
from wandistill.planner.measured import BlockProbes, RankProbe, measured_machines, measured_rates
from wandistill.planner.placements import Placement
from wandistill.planner.rates import Rates
from wandistill.planner.request import PlanRequest
from wandistill.planner.timing import PrepareCost, prepare_cost
from wandistill.student_config import StudentSpec
from wandistill.train.distributed import World
from wandistill.train.probe import probe_machine, with_context
from wandistill.train.probe_blocks import probe_blocks
from wandistill.units import format_bytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settled:
    """A run whose placement is known."""

    config: TrainConfig  # with the placement, and what the plan relies on
    decision: Decision
    probes: list[RankProbe]  # of all ranks
    blocks: list[BlockProbes]
    rates: Rates  # as measured
    seconds: float  # that measuring took

    def prompt_cost(self) -> PrepareCost:
        """What the caches take for one prompt with one rollout."""
        row, steps = self.decision.row, self.config.rollout_steps
        request = row.settled(self.decision.plan.request)
        return prepare_cost(request, row.placement, row.places, prompts=1, rollout_steps=steps, rates=self.rates)

    def to_json(self) -> dict[str, Any]:
        """The parts of run.json that say what was measured and planned."""
        ranks = [
            {"rank": rank, **probe.to_json(), **block.to_json()}
            for rank, (probe, block) in enumerate(zip(self.probes, self.blocks, strict=True))
        ]
        return {"probe": {"seconds": self.seconds, "ranks": ranks}, "plan": self.decision.to_json()}

    def question(self, folder: WanFolder) -> Question:
        """What was asked, to be asked again where memory runs out; a placement that stands for another is that."""
        placed = self.decision.row.placement.value
        config = dataclasses.replace(self.config, teacher_device_strategy=placed)
        return Question(config, str(folder.path), self.decision.plan.request.machines)


def settle(config: TrainConfig, folder: WanFolder, spec: StudentSpec, world: World, *, trains: bool = True) -> Settled:
    """Measures the machine and settles the placement; all ranks call this together.

    Args:
        config: resolved but for the placement.
        trains: whether a student is trained, or caches are filled only.

    Raises:
        DoesNotFit: the run cannot fit, and `--force` is not given.
        ConfigError: the ranks were started with different settings.
    """
    began = time.perf_counter()
    own = probe_machine(world, folder.path, Path(config.output_dir))
    model = dataclasses.replace(model_from_folder(folder.path), name=config.teacher_path, title=config.teacher_path)
    machines = measured_machines(world.gather(own))
    request = request_of_config(config, model, spec, machines, trains=trains)
    # The blocks, whose kernels take memory too, can only make it tighter: what cannot fit need not wait for them. Where
    # `wandistill.launch.forecast` said nothing, as of several nodes and of CPUs, this is the first refusal.
    _decided(request, None, config.force, world)
    blocks = world.gather(probe_blocks(request, folder, world))
    probes = world.gather(with_context(own, world.device))
    request = request.change(machines=measured_machines(probes))
    seconds = time.perf_counter() - began
    rates = measured_rates(request, probes, blocks)
    outcome = _decided(request, rates, config.force, world)
    _check(request, outcome.plan.request, world)
    chosen = {"teacher_device_strategy": outcome.strategy, **outcome.settings}
    placed = from_mapping({**dataclasses.asdict(config), **chosen})
    settled = Settled(placed, outcome, probes, blocks, rates, seconds)
    if world.is_main:
        _log.info(paragraph(outcome))
        for note in filter(None, (_slow_half(settled), _unsplit(config, outcome))):
            _log.warning(f"note: {note}")
    return settled


def _decided(request: PlanRequest, rates: Rates | None, force: bool, world: World) -> Decision:
    """What rank 0 decides; without rates at the catalogue's."""
    outcome = world.broadcast(_decide(request, rates, force) if world.is_main else None)
    if isinstance(outcome, WandistillError):
        raise outcome
    return outcome


def _decide(request: PlanRequest, rates: Rates | None, force: bool) -> Decision | WandistillError:
    try:
        return decide(request, rates, force=force)
    except WandistillError as error:
        return error


def _check(own: PlanRequest, planned: PlanRequest, world: World) -> None:
    """Holds that this rank would have asked what rank 0 asked."""
    fields = [field.name for field in dataclasses.fields(PlanRequest) if field.name not in ("machines", "placement")]
    different = [
        f"{name} {getattr(own, name)} there, {getattr(planned, name)} on rank 0"
        for name in fields
        if getattr(own, name) != getattr(planned, name)
    ]
    for rank, found in enumerate(world.gather(different)):
        if found:
            raise ConfigError(
                f"rank {rank} was started with other settings than rank 0: {'; '.join(found)}. Start all ranks with "
                "the same command."
            )


def _unsplit(asked: TrainConfig, decision: Decision) -> str:
    """What to say of a split fetch that was asked for and cannot be."""
    if asked.stream_fetch != SPLIT or decision.settings.get("stream_fetch") != OWN:
        return ""
    return f"--stream_fetch split: {no_split(decision.plan.request)}; it has no effect here."


def _slow_half(settled: Settled) -> str:
    """What to say of a teacher in half precision that a CPU computes, if it emulates it."""
    config, request = settled.config, settled.decision.plan.request
    on_cpu = not request.on_gpu or config.teacher_device_strategy == Placement.CPU.value
    times = settled.probes[0].slow_bfloat16
    if not on_cpu or times is None or config.teacher_dtype not in ("float16", "bfloat16"):
        return ""
    memory = request.model.experts * 4 * request.model.architecture.parameters
    return (
        f"--teacher_dtype {config.teacher_dtype}: this CPU emulates it ({times:.0f} times as slow as float32), so each "
        f"block is widened to float32 in every pass. --teacher_dtype float32 spares that, with {format_bytes(memory)} "
        "for the teacher."
    )
