"""`wandistill train`."""

from __future__ import annotations

import argparse
import os

from wandistill import config
from wandistill.errors import OutOfMemory
from wandistill.launch.causes import cause_of
from wandistill.launch.forecast import check_job

# Where torch reads how its GPU allocator works, the older name last: the only one that all its versions know.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Where CUDA reads how many launched kernels may wait: https://docs.nvidia.com/cuda/cuda-programming-guide, appendix on
# environment variables.
_LAUNCH_QUEUES = "CUDA_SCALE_LAUNCH_QUEUES"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All settings of `TrainConfig`."""
    config.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Trains; returns 0.

    Raises:
        WandistillError: with the exit code and the sentence for the user.
    """
    settings = config.from_arguments(args)
    check_job(settings)
    set_gpu_environment()
    # Imported here, so that --help, a wrong flag and a run that cannot fit are answered at once.
    from wandistill.train.run import train

    try:
        train(settings)
    except RuntimeError as error:
        # Before the ranks have met there is nobody to tell, and nothing was planned.
        cause = cause_of(error)
        if cause is None:
            raise
        raise OutOfMemory(f"memory ran out before the run began: {cause.message}") from error
    return 0


def set_gpu_environment() -> None:
    """Sets how torch's GPU allocator and CUDA work in this process and those that it starts, unless the user has.

    Segments of fixed sizes break up under tensors that come and go, and then more is reserved than was planned.

    About 1,000 kernels may wait for a GPU, less than what a pipeline's stage computes of one batch of a 14 B teacher.
    The host is then held up until most of them have run, and announces its next request too late for the first stage,
    which idled 13 % of the time on two H200. Four times as many is the most that CUDA takes.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[-1]] = "expandable_segments:True"
    os.environ.setdefault(_LAUNCH_QUEUES, "4x")
