"""Building a pipeline from a device map, and how much of the teacher each rank of a node may hold."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from wandistill.device_map import DeviceMap, Run, runs, unit_bytes
from wandistill.student_config import student_spec
from wandistill.teacher.base import Teacher
from wandistill.teacher.layout import Precision
from wandistill.teacher.pipeline import PipelineTeacher
from wandistill.teacher.route import Route, Station
from wandistill.teacher.stage import load_stage
from wandistill.teacher.transport import Transport
from wandistill.units import parse_bytes

if TYPE_CHECKING:
    from wandistill.teacher import Setting

_log = logging.getLogger(__name__)

# Of a student in training: weights, gradients and two moments in float32, the most that any optimizer takes.
_STUDENT_BYTES_PER_PARAMETER = 16
# Share of a GPU that is left for activations where --max_memory does not say how much the teacher may take.
_ACTIVATIONS_SHARE = 0.2


def build_pipeline(
    setting: Setting, device_map: DeviceMap, transport: Transport, *, served: bool = False
) -> PipelineTeacher:
    """A teacher whose units are where `device_map` says.

    Args:
        device_map: with the members of `transport` as ranks.
        served: whether its rank only computes for the others.
    """
    folder, device = setting.folder, setting.world.device
    blocks = folder.architecture.num_layers
    stations, stages = [], {}
    for number, (member, group) in enumerate(groupby(runs(device_map), key=lambda run: run.place.rank)):
        here: list[Run] = list(group)
        # Unit 0 is the embedding, the last the head: blocks count one less than units.
        first, stop = here[0].units.start - 1, here[-1].units.stop - 1
        stations.append(Station(member, range(max(first, 0), min(stop, blocks))))
        if member == transport.index:
            stages[number] = load_stage(setting, here)
    route = Route(
        stations,
        folder.architecture,
        folder.expand_timesteps,
        Precision.of(setting.dtype, device).compute,
        setting.config.teacher_micro_batch,
    )
    return PipelineTeacher(route, stages, transport, device, served=served)


def sizes(setting: Setting) -> list[int]:
    """Bytes of each unit of all experts."""
    return unit_bytes(setting.folder.architecture, setting.config.teacher_dtype, len(setting.folder.experts))


def limits(setting: Setting, members: Sequence[int]) -> list[int | None]:
    """Most teacher bytes on each member: `--max_memory`, else what a GPU has beside the student; none on a CPU."""
    config, device = setting.config, setting.world.device
    limit: int | None = None
    if config.max_memory:
        limit = parse_bytes(config.max_memory)
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        student = student_spec(config.student_config, setting.folder.architecture).architecture.parameters
        limit = max(int(free - _ACTIVATIONS_SHARE * total) - _STUDENT_BYTES_PER_PARAMETER * student, 0)
    everywhere = setting.world.gather(limit)
    return [everywhere[rank] for rank in members]


def on_one_rank(setting: Setting, reason: str) -> Teacher:
    """The whole teacher on this rank, where a placement has nobody to share it with; says so."""
    from wandistill.teacher import BUILDERS

    strategy = setting.config.teacher_device_strategy
    if setting.world.is_main:
        _log.warning(f"note: --teacher_device_strategy {strategy}: {reason}, so each holds the whole teacher, as gpu.")
    return BUILDERS["gpu"](setting)
