"""The host's time for an optimizer step.

Small parameters are updated together and each other one alone. Follows `wandistill.train.optimizer`, which takes
`JOINED` and `ROW` from here.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from wandistill.architecture import WanArchitecture
from wandistill.planner.parameters import ParameterTensor, block_tensors, outer_tensors, projection_tensors

# Parameters of fewer elements are updated together: a GPU takes less time for them than the host for a call. So many
# elements they have together at most, so that their copies take no memory to speak of.
JOINED = 1 << 16
ROW = 1 << 18


class HostWork(NamedTuple):
    """What the host does for one parameter in a step, clipping included."""

    joined: float  # in PyTorch's additions of a few numbers in place on the CPU: one that is updated with others
    alone: float  # the same of one that is updated on its own
    launches: int  # of kernels, for one that is updated on its own


# Additions as `python -m tests.cpu.bench_optimizer` counts them (torch 2.15, torchao 0.18, a machine of 2 cores).
# Launches: what inductor makes of torchao's update is a kernel, beside the one that draws what is rounded with; 8-bit
# moments are scaled in two more. torch's fused AdamW launches one for hundreds of parameters.
HOST_WORK = {
    "adamw": HostWork(joined=3.0, alone=3.0, launches=0),
    "adamw_bf16": HostWork(joined=7.0, alone=20.5, launches=2),
    "adamw8bit": HostWork(joined=12.0, alone=45.0, launches=4),
}


class Updates(NamedTuple):
    """Parameters on one rank."""

    joined: int
    alone: int

    def host_seconds(self, optimizer: str, operation: float, launch: float) -> float:
        """Of one step.

        Args:
            operation: seconds of an addition of a few numbers in place on the CPU.
            launch: the same on the device.
        """
        each = HOST_WORK[optimizer]
        operations = self.joined * each.joined + self.alone * each.alone
        return operations * operation + self.alone * each.launches * launch


@lru_cache(maxsize=512)
def updates(architecture: WanArchitecture, ranks: int, teacher_width: int, features: int) -> Updates:
    """Of a student that is sharded over `ranks` ranks (1: whole), its feature projections among them."""

    def alone(tensors: tuple[ParameterTensor, ...]) -> int:
        return sum(-(-tensor.shape[0] // ranks) * prod(tensor.shape[1:]) >= JOINED for tensor in tensors)

    blocks, layers = block_tensors(architecture), architecture.num_layers
    outer = outer_tensors(architecture) + projection_tensors(architecture.hidden_size, teacher_width, features)
    large = layers * alone(blocks) + alone(outer)
    return Updates(layers * len(blocks) + len(outer) - large, large)
