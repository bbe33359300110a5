"""Placement `gpu0`: the whole teacher on the GPU of `--teacher_rank`, which computes for all ranks of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wandistill.device_map import Place
from wandistill.errors import ConfigError
from wandistill.teacher.base import Teacher
from wandistill.teacher.spread import build_pipeline, on_one_rank
from wandistill.teacher.transport import Transport, job_members

if TYPE_CHECKING:
    from wandistill.teacher import Setting


def build(setting: Setting) -> Teacher:
    """With `--teacher_rank_trains no`, the teacher rank makes no requests, but calls `PipelineTeacher.serve`.

    Raises:
        ConfigError: there is no such rank, or nobody would be left to train.
    """
    config, world = setting.config, setting.world
    if not 0 <= config.teacher_rank < world.size:
        raise ConfigError(
            f"--teacher_rank {config.teacher_rank}: the job has {world.size} rank(s), counted from 0; name one of them."
        )
    only_serves = config.teacher_rank_trains == "no"
    if world.size == 1:
        if only_serves:
            raise ConfigError(
                "--teacher_rank_trains no: there is one rank, and nobody would be left to train. Start more ranks, or "
                "leave the flag out."
            )
        return on_one_rank(setting, "there is one rank")
    units = setting.folder.architecture.num_layers + 2
    placed = (Place(config.teacher_rank),) * units
    return build_pipeline(setting, placed, Transport(world, job_members(world)), served=only_serves)
