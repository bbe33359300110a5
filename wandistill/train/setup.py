"""What a run is before any weights are loaded: its settings, resolved for this teacher and machine, and its ranks."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from wandistill import teacher as placement
from wandistill.config import FIELDS, TrainConfig, from_mapping, parse_resolution, with_defaults
from wandistill.launch import records
from wandistill.launch.remedy import REPLANNED
from wandistill.launch.state import replanned
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.student_config import StudentSpec, student_spec
from wandistill.teacher.gpu0 import serving_rank
from wandistill.train.distributed import World

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """What is known before any weights are loaded."""

    config: TrainConfig  # resolved: no default is left that depends on machine or teacher, once `settle` has placed it
    folder: WanFolder
    spec: StudentSpec
    world: World  # the ranks that train
    dtype: torch.dtype  # of the teacher
    job: World  # all ranks

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the teacher computes in: 8-bit weights are turned to bfloat16."""
        return torch.bfloat16 if self.config.teacher_dtype in placement.QUANTIZED else self.dtype

    @property
    def placement(self) -> placement.Setting:
        """What the teacher is placed from; placements span all ranks."""
        return placement.Setting(self.config, self.folder, self.dtype, self.job)

    @property
    def output_dir(self) -> Path:
        """The run's directory."""
        return Path(self.config.output_dir)


def with_replans(config: TrainConfig, world: World) -> TrainConfig:
    """With the placement that `wandistill launch` changed after memory had run out; all nodes read the same one."""
    if config.on_oom != "replan":
        return config
    asked = {name: getattr(config, name) for name in REPLANNED}
    changes = world.broadcast(replanned(Path(config.output_dir), asked) if world.is_main else None)
    return from_mapping({**dataclasses.asdict(config), **changes})


def divide(setup: Setup) -> Setup:
    """Leaves the rank out of training that only computes the teacher, if there is one."""
    serving = serving_rank(setup.config, setup.job)
    if serving is None:
        return setup
    setup = dataclasses.replace(setup, world=setup.job.without(serving))
    if setup.world.is_main:
        logging.getLogger().setLevel(logging.INFO)  # rank 0 tells how the run goes; here this one is its rank 0
        _log.info(f"rank {serving} only computes the teacher; {setup.world.size} rank(s) train")
    return setup


def resolve(config: TrainConfig, world: World) -> Setup:
    """Opens the teacher and settles every default that depends on it or on the machine.

    Raises:
        ConfigError: a teacher, student, resolution or combination of settings that cannot be.
    """
    folder = open_teacher(config.teacher_path, config.teacher_revision)
    spec = student_spec(config.student_config, folder.architecture)
    config = with_defaults(config, spec, device=world.device.type, flow_shift=folder.flow_shift)
    folder.latent_shape(*parse_resolution(config.resolution))
    return Setup(config, folder, spec, world, placement.DTYPES[config.teacher_dtype], world)


def tell_notes(setup: Setup) -> None:
    """Says on rank 0 what teacher and student leave out, and which settings change nothing."""
    if setup.world.is_main:
        ineffective = _ineffective(setup.config, setup.folder, setup.world)
        for text in [*setup.folder.notes, *setup.spec.notes, *ineffective]:
            _log.warning(f"note: {text}")


def _ineffective(config: TrainConfig, folder: WanFolder, world: World) -> list[str]:
    """Settings that change nothing in this run."""
    strategy = config.teacher_device_strategy

    def only(places: tuple[str, ...], setting: str) -> tuple[bool, str]:
        changed = getattr(config, setting) != FIELDS[setting].default
        return changed and strategy not in places, f"--{setting}: only {' and '.join(places)} read it, not {strategy}"

    found = [
        only(("cpu", "offload", "stream"), "share_teacher"),
        only(("cpu", "offload", "stream"), "share_dir"),
        only(("gpu0",), "teacher_rank"),
        only(("gpu0",), "teacher_rank_trains"),
        only(("custom",), "teacher_device_map"),
        only(("balanced", "sequential"), "max_memory"),
        only(("stream",), "resident_blocks"),
        only(("stream",), "stream_fetch"),
        only(("disk",), "disk_buffer"),
        (config.ema_device != "gpu" and config.ema_decay == 0, "--ema_device: --ema_decay is 0, there is no average"),
        (config.student_parallel == "fsdp" and world.size == 1, "--student_parallel fsdp: one rank shards nothing"),
        (bool(config.sample_prompts) and not config.save_samples, "--sample_prompts: --no_save_samples draws none"),
        (config.on_oom == "replan" and records.folder() is None, "--on_oom replan: only wandistill launch starts anew"),
        (len(folder.experts) == 1 and config.init in ("average", "high"), f"--init {config.init}: there is one expert"),
    ]
    return [f"{text}; it has no effect here." for applies, text in found if applies]


def set_precision(setup: Setup) -> None:
    """Sets torch's precision and determinism for the whole process."""
    if setup.world.device.type != "cuda":
        return
    torch.set_float32_matmul_precision("highest" if setup.config.deterministic else "high")
    torch.backends.cudnn.allow_tf32 = not setup.config.deterministic
    if setup.config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
