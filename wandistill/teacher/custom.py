"""Placement `custom`: blocks where the file of `--teacher_device_map` puts them, a pipeline through the whole job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from wandistill.device_map import read_device_map
from wandistill.errors import ConfigError
from wandistill.teacher.base import Teacher
from wandistill.teacher.spread import build_pipeline
from wandistill.teacher.transport import Transport, job_members

if TYPE_CHECKING:
    from wandistill.teacher import Setting


def build(setting: Setting) -> Teacher:
    """Parts on `cpu` or `disk` are brought block by block to the rank that computes them.

    Raises:
        ConfigError: no file was given, or the map in it cannot be.
    """
    config, world = setting.config, setting.world
    if not config.teacher_device_map:
        raise ConfigError(
            "--teacher_device_strategy custom needs --teacher_device_map FILE, a JSON or YAML file that gives every "
            "block a rank, cpu or disk, such as '0-19: 0' and '20-39: cpu'."
        )
    layers = setting.folder.architecture.num_layers
    placed = read_device_map(Path(config.teacher_device_map), layers, world.size)
    return build_pipeline(setting, placed, Transport(world, job_members(world)))
