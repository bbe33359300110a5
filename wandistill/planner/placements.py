"""The placements of the frozen teacher: one enum, and one spec each that says what lies where.

A new placement is a member here, its spec, what it takes in `wandistill.planner.teacher_memory` and
`wandistill.planner.timing`, and a builder in `wandistill.teacher`, whose names a test holds equal to these.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum

from wandistill.errors import ConfigError


class Placement(str, Enum):
    """Where the teacher's weights live; the values are those of `--teacher_device_strategy`."""

    GPU = "gpu"
    GPU0 = "gpu0"
    BALANCED = "balanced"
    SEQUENTIAL = "sequential"
    CUSTOM = "custom"
    SHARDED = "sharded"
    STREAM = "stream"
    OFFLOAD = "offload"
    DISK = "disk"
    CPU = "cpu"


# No placement but a request: the fastest that fits.
AUTO = "auto"


class Store(str, Enum):
    """Where weights are between uses."""

    DEVICE = "each rank's device"
    TEACHER_RANK = "the teacher rank's device"
    SPREAD = "spread over the devices of a node"
    HOST = "one copy in the memory of each node"
    DISK = "the safetensors on disk"


class Compute(str, Enum):
    """Who computes the teacher."""

    EACH_RANK = "each rank"
    TEACHER_RANK = "the teacher rank, for all"
    PIPELINE = "the ranks in turn, each its blocks"
    CORES = "each rank, on its share of the cores"


@dataclass(frozen=True)
class PlacementSpec:
    """What distinguishes a placement."""

    store: Store
    compute: Compute
    copies: str  # of the teacher: a rank, a node, a job, or none in memory
    min_ranks: int = 1  # fewer ranks on a node hold the whole teacher each, as gpu does
    slots: int = 0  # fixed buffers on the device that blocks pass through
    side_stream: bool = False  # computes beside the student, in a memory pool of its own
    whole_job: bool = False  # spans all nodes, not the ranks of one
    summary: str = ""

    @property
    def host_copy(self) -> bool:
        """Whether a node keeps one shared copy of the weights in its memory."""
        return self.store is Store.HOST

    @property
    def fed(self) -> bool:
        """Whether blocks come to the device in every pass."""
        return self.slots > 0


SPECS: dict[Placement, PlacementSpec] = {
    Placement.GPU: PlacementSpec(
        Store.DEVICE, Compute.EACH_RANK, "one a rank", summary="the whole teacher on every GPU"
    ),
    Placement.GPU0: PlacementSpec(
        Store.TEACHER_RANK,
        Compute.TEACHER_RANK,
        "one in the job",
        min_ranks=2,
        side_stream=True,
        whole_job=True,
        summary="the teacher on one GPU, which computes for all",
    ),
    Placement.BALANCED: PlacementSpec(
        Store.SPREAD,
        Compute.PIPELINE,
        "one a node",
        min_ranks=2,
        side_stream=True,
        summary="blocks spread evenly over the GPUs, a pipeline through them",
    ),
    Placement.SEQUENTIAL: PlacementSpec(
        Store.SPREAD,
        Compute.PIPELINE,
        "one a node",
        min_ranks=2,
        side_stream=True,
        summary="GPU 0 filled with blocks, then GPU 1, a pipeline through them",
    ),
    Placement.CUSTOM: PlacementSpec(
        Store.SPREAD,
        Compute.PIPELINE,
        "one in the job",
        side_stream=True,
        whole_job=True,
        summary="blocks where --teacher_device_map puts them",
    ),
    Placement.SHARDED: PlacementSpec(
        Store.SPREAD,
        Compute.EACH_RANK,
        "one a node",
        min_ranks=2,
        slots=2,
        summary="a part of every block on each GPU, the others' parts read in turn",
    ),
    Placement.STREAM: PlacementSpec(
        Store.HOST, Compute.EACH_RANK, "one a node", slots=3, summary="blocks prefetched from one host copy"
    ),
    Placement.OFFLOAD: PlacementSpec(
        Store.HOST, Compute.EACH_RANK, "one a node", slots=1, summary="one block at a time from one host copy"
    ),
    Placement.DISK: PlacementSpec(
        Store.DISK, Compute.EACH_RANK, "none in memory", slots=2, summary="blocks read from disk in every step"
    ),
    Placement.CPU: PlacementSpec(Store.HOST, Compute.CORES, "one a node", summary="computed on the CPU"),
}


def find_placement(value: str) -> Placement:
    """The placement of a name.

    Raises:
        ConfigError: there is no such placement; the message lists them.
    """
    try:
        return Placement(value)
    except ValueError:
        names = [placement.value for placement in Placement]
        close = difflib.get_close_matches(value, names, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"placement '{value}' does not exist; known are {', '.join(names)} and {AUTO}.{hint}"
        ) from None
