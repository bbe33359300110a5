"""`wandistill train`."""

from __future__ import annotations

import argparse

from wandistill import config
from wandistill.errors import OutOfMemory
from wandistill.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All settings of `TrainConfig`."""
    config.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Trains; returns 0."""
    settings = config.from_arguments(args)
    # Imported here, so that --help and a wrong flag answer at once.
    import torch

    from wandistill.train.run import train

    try:
        train(settings)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise OutOfMemory(
            f"the GPU's memory ran out: {format_bytes(torch.cuda.memory_allocated())} allocated, "
            f"{format_bytes(torch.cuda.memory_reserved())} reserved, {format_bytes(free)} of {format_bytes(total)} "
            "free. Lower --batch_size (and raise --gradient_accumulation_steps), or add --gradient_checkpointing, "
            "--teacher_device_strategy cpu, or --optimizer adamw8bit."
        ) from error
    return 0
