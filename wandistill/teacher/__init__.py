"""Placing the teacher: the map from a placement's name to what builds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from wandistill.teacher.base import Teacher

if TYPE_CHECKING:
    from wandistill.config import TrainConfig
    from wandistill.models.wan import WanFolder
    from wandistill.train.distributed import World

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8": torch.float8_e4m3fn,
}
# Storage only: computed in bfloat16.
QUANTIZED = ("int8", "float8")


@dataclass(frozen=True)
class Setting:
    """What a placement is built from."""

    config: TrainConfig
    folder: WanFolder
    dtype: torch.dtype
    world: World


BUILDERS: dict[str, Callable[[Setting], Teacher]] = {
    "gpu": lambda setting: import_module("wandistill.teacher.gpu").build(setting),
    "gpu0": lambda setting: import_module("wandistill.teacher.gpu0").build(setting),
    "balanced": lambda setting: import_module("wandistill.teacher.balanced").build(setting),
    "sequential": lambda setting: import_module("wandistill.teacher.sequential").build(setting),
    "custom": lambda setting: import_module("wandistill.teacher.custom").build(setting),
    "sharded": lambda setting: import_module("wandistill.teacher.sharded").build(setting),
    "cpu": lambda setting: import_module("wandistill.teacher.cpu").build(setting),
    "offload": lambda setting: import_module("wandistill.teacher.offload").build(setting),
    "stream": lambda setting: import_module("wandistill.teacher.stream").build(setting),
    "disk": lambda setting: import_module("wandistill.teacher.disk").build(setting),
}


def place(setting: Setting) -> Teacher:
    """Loads the teacher at its place, which is settled: not `auto`."""
    return BUILDERS[setting.config.teacher_device_strategy](setting)
