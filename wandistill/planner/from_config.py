"""The planner's question about a run, from the run's configuration."""

from __future__ import annotations

from pathlib import Path

from wandistill.catalog import Model
from wandistill.config import TrainConfig, parse_resolution
from wandistill.device_map import read_device_map
from wandistill.planner.placements import AUTO
from wandistill.planner.request import Machines, PlanRequest
from wandistill.student_config import StudentSpec
from wandistill.units import parse_bytes


def request_of_config(
    config: TrainConfig, model: Model, student: StudentSpec, machines: Machines, *, trains: bool = True
) -> PlanRequest:
    """What is asked about a run.

    Args:
        config: resolved but for the placement, which may be `auto`.
        model: the teacher.
        trains: whether a student is trained, or caches are filled only.

    Raises:
        ConfigError: a device map that cannot be read, or an amount of memory that is none.
    """
    width, height = parse_resolution(config.resolution)
    path = config.teacher_device_map if config.teacher_device_strategy in ("custom", AUTO) else ""
    return PlanRequest(
        model=model,
        student=student.architecture,
        student_name=student.name,
        machines=machines,
        width=width,
        height=height,
        batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        teacher_dtype=config.teacher_dtype,
        teacher_micro_batch=config.teacher_micro_batch,
        teacher_compile=config.teacher_compile,
        guided=config.guidance_scale != 1 or config.guidance_low != 1,
        optimizer=config.optimizer,
        mixed_precision=config.mixed_precision,
        student_parallel=config.student_parallel,
        ema_device=config.ema_device if config.ema_decay > 0 else "none",
        gradient_checkpointing=config.gradient_checkpointing,
        features=config.feature_weight > 0,
        embeddings=config.embeddings,
        targets=config.targets,
        save_samples=config.save_samples,
        checkpoints=min(config.keep_checkpoints + 1, _written(config)),
        resident_blocks=config.kept_blocks,
        stream_fetch=config.stream_fetch,
        disk_buffer=parse_bytes(config.disk_buffer) if config.disk_buffer else None,
        share_dir=bool(config.share_dir),
        max_memory=parse_bytes(config.max_memory) if config.max_memory else None,
        teacher_rank=config.teacher_rank,
        teacher_rank_trains=config.teacher_rank_trains,
        device_map=read_device_map(Path(path), model.architecture.num_layers, machines.world) if path else None,
        placement=config.teacher_device_strategy,
        memory_margin=config.memory_margin,
        trains=trains,
    )


def _written(config: TrainConfig) -> int:
    """Checkpoints that the run writes in all, as far as its length is known."""
    return -(-config.max_steps // config.checkpoint_interval) if config.max_steps else config.keep_checkpoints + 1
