"""The cases of the benchmark: what is placed how, in which worlds, on which shapes, and what that needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.gpu.bench_measure import Shape

SMALL, WIDE, LARGE = Shape("832x480", 1), Shape("832x480", 8), Shape("1024x1024", 4)
# With --tiny: the same batches of four tokens a picture.
TINY = {SMALL: Shape("32x32", 1, 8), WIDE: Shape("32x32", 8, 8), LARGE: Shape("32x32", 4, 8)}


@dataclass(frozen=True)
class Case:
    """One way to keep the teacher.

    Args:
        placement: of wandistill; empty: one of `bench_peers.PEERS`, by the case's name.
        ranks: sizes of the worlds that it is measured in.
        shapes: number of ranks -> what a rank asks for.
        link: whose speed bounds it, where it moves weights: host or peer.
        settings: flags of wandistill train.
        gpu, host: weights of the teacher (1.0: one whole) on each GPU, and in the memory of the node with `ranks`
            ranks; what the machine lacks is said beforehand.
        moved: of a peer, weights that it brings to each rank in a step, which it doesn't count.
        extra: only measured when it is named.
    """

    name: str
    placement: str = ""
    ranks: tuple[int, ...] = (1, 2)
    shapes: Mapping[int, tuple[Shape, ...]] = field(default_factory=lambda: {1: (SMALL, WIDE, LARGE), 2: (SMALL, WIDE)})
    link: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    warm_up: int = 2
    repeats: int = 5
    gpu: float = 0.1
    host: Mapping[int, float] = field(default_factory=lambda: {1: 0.0, 2: 0.0})
    moved: Mapping[int, float] = field(default_factory=dict)
    extra: bool = False

    @property
    def compiled(self) -> bool:
        """Whether its blocks are."""
        return bool(self.settings.get("teacher_compile"))


@dataclass(frozen=True)
class TrainerCase:
    """Whole training steps of each rank on shape WIDE, see `bench_trainer`.

    The fields are those of `Case`; `gpu` counts the student too.
    """

    name: str
    placement: str
    ranks: tuple[int, ...]
    settings: Mapping[str, Any]
    gpu: float
    host: Mapping[int, float] = field(default_factory=dict)


def _both(share: float) -> dict[int, float]:
    return {1: share, 2: share}


_ONE_SMALL = {1: (SMALL,), 2: (SMALL,)}

# The others' seconds are told relative to its own.
RESIDENT = Case("resident", "gpu", repeats=7, gpu=1.0)
STREAM = Case("stream", "stream", link="host", host=_both(1.0))
SHARDED = Case("sharded", "sharded", ranks=(2,), link="peer", gpu=0.6, repeats=10)
CASES = (
    # The resident one first: the others' seconds are told relative to its own too.
    *(
        replace(case, name=f"{case.name}-compiled", settings={"teacher_compile": True}, extra=True)
        for case in (RESIDENT, STREAM, SHARDED)
    ),
    STREAM,
    Case(
        "stream-split", "stream", ranks=(2,), link="host", settings={"stream_fetch": "split"}, host=_both(1.0),
        repeats=10,
    ),
    Case("offload", "offload", link="host", host=_both(1.0)),
    Case("disk", "disk", shapes=_ONE_SMALL, warm_up=1, repeats=2),
    Case("cpu", "cpu", shapes=_ONE_SMALL, warm_up=1, repeats=1, host=_both(1.0)),
    SHARDED,
    Case("balanced", "balanced", ranks=(2,), gpu=0.6, repeats=20),
    Case("sequential", "sequential", ranks=(2,), shapes=_ONE_SMALL, gpu=1.0),
    # Its forwards alone; whole training steps are in TRAINER_CASES.
    Case("gpu0", "gpu0", ranks=(2,), gpu=1.0, settings={"teacher_rank_trains": "yes"}),
    Case(
        "accelerate-cpu-offload", ranks=(1,), shapes=_ONE_SMALL, link="host", warm_up=1, repeats=1, host=_both(1.1),
        moved=_both(1.0),
    ),
    # Its page-locked tensors are rounded up to powers of two.
    Case("diffusers-group-offload", ranks=(1,), link="host", host=_both(2.6), moved=_both(1.0)),
    Case("fsdp2", ranks=(2,), link="peer", gpu=0.7, host={2: 2.1}, moved={2: 0.5}),
    Case("fsdp2-cpu-offload", ranks=(2,), link="host", host={2: 3.6}, moved={2: 0.5}),
)  # fmt: skip
TRAINER_CASES = (
    TrainerCase("gpu0-trains", "gpu0", (2,), {"teacher_rank_trains": "yes"}, gpu=1.6),
    TrainerCase("gpu0-serves", "gpu0", (2,), {"teacher_rank_trains": "no"}, gpu=1.0),
    # Weights and gradients in bfloat16, 8-bit moments: in float32 they would fill a GPU.
    TrainerCase(
        "stream-trains-half", "stream", (1,),
        {"student_config": "half", "optimizer": "adamw8bit", "mixed_precision": "no"}, gpu=1.7, host={1: 1.0},
    ),
)  # fmt: skip
NAMES = (RESIDENT.name, *(case.name for case in (*CASES, *TRAINER_CASES)))
