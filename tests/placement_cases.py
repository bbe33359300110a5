"""The cases of the placements' suite: what `placement_world.py` runs and `cpu/test_placements.py` judges. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Worlds of real ranks on one machine: name -> (ranks, nodes that they pretend to be).
WORLDS = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "2x2": (4, 2)}

SAME = "every request is one batch of the same shape on the same device, computed by the same functions"
# Placement -> (greatest relative L2 distance to the resident teacher on the same rank, why).
TOLERANCE = {
    "gpu": (0.0, "it is the resident teacher"),
    "gpu0": (0.0, f"{SAME}: ranks' requests are not put together; x and prompts are sent in the model's own dtype"),
    "balanced": (0.0, f"{SAME}; what passes from rank to rank is copied, not converted"),
    "sequential": (0.0, f"{SAME}; what passes from rank to rank is copied, not converted"),
    "custom": (0.0, f"{SAME}; parts on cpu and disk are copied, not converted"),
    "sharded": (0.0, f"{SAME}; peers' parts are copied, not converted"),
    "cpu": (0.0, f"{SAME}, with as many threads"),
    "offload": (0.0, f"{SAME}; blocks are copied, not converted"),
    "stream": (0.0, f"{SAME}; blocks are copied, not converted"),
    "disk": (0.0, f"{SAME}; blocks are read, and converted as the loader converts them"),
    "registered": (0.0, f"{SAME}: see placement_registered.py"),
}
# Losses of a run may differ by as much in float32 on a CPU (design.md); with equal targets they do not.
LOSS_TOLERANCE = 0.0

# Placements whose ranks compute for each other, so that they must agree about the expert.
COUPLED = ("gpu0", "balanced", "sequential", "custom", "sharded")


@dataclass(frozen=True)
class Case:
    """One thing that a world does."""

    kind: str  # the function of placement_world.py
    world: str
    placement: str
    teacher: str = "embedded"
    variant: str = ""  # of the placement's settings
    settings: dict[str, Any] = field(default_factory=dict)
    fault: str = ""

    @property
    def name(self) -> str:
        """Unlike any other case's."""
        chosen = [f"{key}={value}" for key, value in self.settings.items()]
        parts = [self.kind, self.world, self.placement, self.variant, self.teacher, *chosen, self.fault]
        return " ".join(part for part in parts if part)


LAYOUTS = ("t2v-1.3b", "t2v-14b", "t2v-a14b", "ti2v-5b")
PLACEMENTS = tuple(name for name in TOLERANCE if name != "gpu")
# Settings that a placement comes in, beside its plain one.
VARIANTS = {
    "gpu0": ("last",),
    "custom": ("stored", "outer"),
    "sharded": ("peers",),
    "sequential": ("first",),
    "stream": ("split",),
}


# A tiny teacher with two experts, where nothing more is needed.
TINY = "t2v-a14b"
# The arguments of a case whose ranks share the fetch of stream.
SPLIT = ("stream", TINY, "split")


def _each(world: str, placements: Sequence[str] = PLACEMENTS, **more: Any) -> list[Case]:
    return [
        Case("targets", world, placement, variant=variant, **more)
        for placement in placements
        for variant in ("", *VARIANTS.get(placement, ()))
    ]


TARGETS = [
    *(case for teacher in ("embedded", TINY) for case in _each("1", teacher=teacher)),
    *(case for teacher in ("embedded", *LAYOUTS) for case in _each("2", teacher=teacher)),
    *(Case("targets", "4", placement) for placement in PLACEMENTS),
    *(case for teacher in (TINY, "ti2v-5b") for case in _each("4", teacher=teacher)),
    *_each("2x2", (*COUPLED, "stream"), teacher=TINY),
    *_each("2", teacher=TINY, settings={"teacher_micro_batch": 3}),
    *_each("2", teacher=TINY, settings={"teacher_dtype": "bfloat16"}),
    *_each("2", (*COUPLED, "stream"), teacher=TINY, settings={"teacher_dtype": "int8"}),
    *_each("2", ("balanced", "sharded", "stream"), teacher=TINY, settings={"teacher_compile": True}),
    *(Case("targets", world, *SPLIT, settings={"resident_blocks": 1}) for world in ("2", "4")),
]
LOSSES = [
    *(Case("losses", world, placement, TINY) for world in ("1", "2", "4") for placement in PLACEMENTS),
    *(Case("losses", "2", placement) for placement in ("balanced", "sharded")),
    *(Case("losses", world, *SPLIT) for world in ("2", "4")),
]
DELAYS = [Case("delays", world, *SPLIT) for world in ("2", "4")]
MEMORY = [Case("memory", "4", placement) for placement in ("gpu0", "balanced", "sequential", "sharded")]
SERVED = [Case("served", world, "gpu0", TINY, settings={"teacher_rank_trains": "no"}) for world in ("2", "4")]
DISAGREEMENTS = [
    *(Case("disagreement", "2", placement, TINY) for placement in COUPLED),
    Case("disagreement", "2", *SPLIT),
]
READ_BY_RECORD = tuple(name for name in PLACEMENTS if name != "registered")
FAULTS = [
    # The parts of a block that one rank holds are not those of the next block, so these cannot be misread.
    *(Case("targets", "2", name, TINY, fault="swapped block") for name in READ_BY_RECORD if name != "sharded"),
    Case("targets", "2", "sharded", TINY, fault="swapped part"),
    *(Case("targets", "2", name, TINY, fault="wrong expert") for name in READ_BY_RECORD),
    *(Case("targets", "2", name, TINY, fault="stale slot") for name in ("offload", "stream", "sharded")),
    *(Case("targets", "2", name, TINY, fault="stale state") for name in ("balanced", "sequential", "custom")),
    Case("targets", "2", "gpu0", TINY, fault="stale input"),
    *(
        Case("targets", "2", *SPLIT, fault=fault)
        for fault in ("swapped block", "wrong expert", "stale slot", "stale part")
    ),
]
IN_WORLDS = [*TARGETS, *LOSSES, *DELAYS, *MEMORY, *FAULTS, *SERVED, *DISAGREEMENTS]

# Each of these is a world of its own, of which one rank dies.
KILLED = [
    *(Case("killed", "2", placement, TINY) for placement in ("gpu", *PLACEMENTS)),
    Case("killed", "2", "gpu", TINY, variant="stuck"),
    Case("killed", "2", *SPLIT),
]
