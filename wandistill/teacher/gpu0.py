"""Placement `gpu0`: the whole teacher on the GPU of `--teacher_rank`, which computes for all ranks of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wandistill.device_map import Place
from wandistill.errors import ConfigError
from wandistill.teacher.base import Teacher
from wandistill.teacher.spread import build_pipeline, on_one_rank
from wandistill.teacher.transport import Transport, job_members

if TYPE_CHECKING:
    from wandistill.config import TrainConfig
    from wandistill.teacher import Setting
    from wandistill.train.distributed import World


def serving_rank(config: TrainConfig, world: World) -> int | None:
    """The rank that computes the teacher and trains no student, if there is one.

    Args:
        world: all ranks of the job.

    Raises:
        ConfigError: there is no such rank, or nobody would be left to train.
    """
    if config.teacher_device_strategy != "gpu0":
        return None
    if not 0 <= config.teacher_rank < world.size:
        raise ConfigError(
            f"--teacher_rank {config.teacher_rank}: the job has {world.size} rank(s), counted from 0; name one of them."
        )
    if config.teacher_rank_trains != "no":
        return None
    if world.size == 1:
        raise ConfigError(
            "--teacher_rank_trains no: there is one rank, and nobody would be left to train. Start more ranks, or "
            "leave the flag out."
        )
    return config.teacher_rank


def build(setting: Setting) -> Teacher:
    """With `--teacher_rank_trains no`, the teacher rank makes no requests, but calls `PipelineTeacher.serve`.

    Raises:
        ConfigError: see `serving_rank`.
    """
    config, world = setting.config, setting.world
    served = serving_rank(config, world) is not None
    if world.size == 1:
        return on_one_rank(setting, "there is one rank")
    units = setting.folder.architecture.num_layers + 2
    placed = (Place(config.teacher_rank),) * units
    return build_pipeline(setting, placed, Transport(world, job_members(world)), served=served)
