"""What a run measured at its start, as the planner takes it: machines and rates from the probes of all ranks.

`wandistill.train.probe` measures; here are only its numbers, so that a plan can be made again from a file, and tested
with a machine that is not there. Of several ranks or nodes the one with the least counts, since all must fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from wandistill.architecture import WanArchitecture
from wandistill.catalog import Gpu, find_gpu
from wandistill.errors import ConfigError
from wandistill.planner.activations import Pass
from wandistill.planner.memory import CUDA_CONTEXT, NCCL_COMMUNICATOR
from wandistill.planner.placements import Placement
from wandistill.planner.rates import (
    HOST_LINK_SHARE,
    MATRIX_SHARE,
    PEER_LINK_SHARE,
    TRAFFIC_SHARE,
    Rates,
    catalogue_rates,
)
from wandistill.planner.request import Machines, PlanRequest
from wandistill.planner.tape import Compute
from wandistill.planner.teacher_memory import records
from wandistill.planner.timing import training_seconds, widening_seconds, work_seconds
from wandistill.planner.work import block_work, outer_work

# GB/s, where no file of the teacher is large enough to measure.
_DISK_RATE = 3.0
# A CPU whose bfloat16 takes this many times as long as float32 emulates it.
_EMULATED = 2.0


@dataclass(frozen=True)
class GpuProbe:
    """A rank's GPU. Bytes, and bytes or operations a second; None: could not be measured."""

    name: str  # as CUDA has it
    capability: tuple[int, int]
    total: int
    free: int
    reserved: int  # by torch's allocator of this process
    alone: bool  # no other process is on the GPU
    peer_access: bool  # to the GPUs of the node's other ranks
    host_link: float | None  # from page-locked memory, all ranks at once
    peer_link: float | None  # from the node's other GPUs
    half: float | None  # of a matrix product
    float32: float | None
    memory: float | None  # of a copy on the device


@dataclass(frozen=True)
class BlockProbe:
    """One block with random weights: its forward, or as it is trained."""

    run: Pass  # of one layer
    seconds: float
    trained: bool = False  # the backward is part of it
    again: bool = False  # which computed the forward once more

    def scale(self, rates: Rates) -> float:
        """Its seconds over those that `rates` give."""
        work, width = block_work(self.run), self.run.compute.hidden
        if self.trained:
            return self.seconds / training_seconds(work, width, rates, again=self.again)
        return self.seconds / work_seconds(work, width, rates)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        run = self.run
        return {
            "seconds": self.seconds,
            "architecture": run.architecture.to_config(),
            "batch": run.batch,
            "tokens": run.tokens,
            "prompt": run.prompt,
            "compute": asdict(run.compute),
            "per_token": run.per_token,
            "trained": self.trained,
            "again": self.again,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> BlockProbe:
        """What `to_json` gave; an earlier version measured no backward."""
        sizes = {name: content[name] for name in ("batch", "tokens", "prompt", "per_token")}
        architecture = WanArchitecture.from_config(content["architecture"])
        run = Pass(architecture=architecture, compute=Compute(**content["compute"]), **sizes)
        return cls(run, content["seconds"], content.get("trained", False), content.get("again", False))


@dataclass(frozen=True)
class BlockProbes:
    """A block of the teacher and one of the student on a rank's device; None: not measured."""

    teacher: BlockProbe | None = None
    student: BlockProbe | None = None
    cores: BlockProbe | None = None  # the teacher's on the rank's share of the cores
    widening: float | None = None  # seconds to turn a stored block of the teacher to what the device computes with
    # Seconds in which what lies outside the student's blocks is trained, in the shape of `student`, with its loss.
    outside: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        blocks = {f"{name}_block": one.to_json() if one else None for name, one in self._blocks.items()}
        return {**blocks, "widening_seconds": self.widening, "outside_seconds": self.outside}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> BlockProbes:
        """What `to_json` gave; what an earlier version did not measure is not there."""
        blocks = {name: content.get(f"{name}_block") for name in cls()._blocks}
        found = {name: BlockProbe.from_json(block) for name, block in blocks.items() if block}
        return cls(**found, widening=content.get("widening_seconds"), outside=content.get("outside_seconds"))

    def outside_beyond(self, rates: Rates) -> float | None:
        """What `outside` takes beyond the seconds that `rates` give; None: not measured."""
        if self.student is None or self.outside is None:
            return None
        run = self.student.run
        return self.outside - training_seconds(outer_work(run), run.compute.hidden, rates, again=False)

    @property
    def _blocks(self) -> dict[str, BlockProbe | None]:
        return {"teacher": self.teacher, "student": self.student, "cores": self.cores}


@dataclass(frozen=True)
class RankProbe:
    """The machine of one rank. Bytes, and bytes or operations a second."""

    node: int
    gpu: GpuProbe | None
    host_available: int  # of the node, or what its cgroups leave if that is less
    host_limit: int | None  # of the tightest cgroup; None: there is none
    host_own: int  # that this process has taken
    cores: int  # that this process may use
    core_float32: float  # operations of all threads of the rank
    core_bfloat16: float
    shm: int
    shm_free: int
    disk_free: int  # where the run writes, its own checkpoints counted as free
    disk_rate: float | None  # of the teacher's files; None: they are too small
    computes_bfloat16: bool = False  # the CPU has kernels for it
    # Seconds for an addition of a few numbers in place, on the CPU and on the rank's device; None: not measured.
    operation: float | None = None
    launch: float | None = None

    @property
    def slow_bfloat16(self) -> float | None:
        """How many times as long as float32 this CPU's bfloat16 takes, where it is emulated."""
        times = self.core_float32 / self.core_bfloat16
        return times if times >= _EMULATED and not self.computes_bfloat16 else None

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RankProbe:
        """What `to_json` gave."""
        gpu = content["gpu"]
        card = GpuProbe(**{**gpu, "capability": tuple(gpu["capability"])}) if gpu else None
        known = {field.name: content[field.name] for field in fields(cls) if field.name in content}
        return cls(**{**known, "gpu": card})


def block_to_measure(run: Pass, *, work: float, weights: int) -> Pass:
    """One block of `run`, of at most `work` operations and `weights` bytes: fewer rows, fewer tokens, less width."""
    architecture = replace(run.architecture, num_layers=1)
    while architecture.block_parameters * run.compute.stored > weights and architecture.num_attention_heads > 1:
        heads = (architecture.num_attention_heads + 1) // 2
        architecture = replace(architecture, num_attention_heads=heads, ffn_dim=(architecture.ffn_dim + 1) // 2)
    block = replace(run, architecture=architecture)
    rows = _within(lambda rows: replace(block, batch=rows), run.batch, work)
    tokens = _within(lambda tokens: replace(block, batch=rows, tokens=tokens), run.tokens, work)
    return replace(block, batch=rows, tokens=tokens)


def _within(make: Callable[[int], Pass], most: int, work: float) -> int:
    """`most`, halved until a block has at most `work` operations; at least 1."""
    while most > 1 and operations(make(most)) > work:
        most //= 2
    return most


def operations(run: Pass) -> float:
    """Of a block's forward, those left out that the prompt's keys and values take however few the tokens are."""
    one, prompt = block_work(run), 4 * run.batch * run.prompt * run.architecture.hidden_size**2
    return one.matrix_flops - prompt + one.attention_flops


def measured_machines(probes: Sequence[RankProbe]) -> Machines:
    """The nodes that the ranks are on."""
    nodes = {probe.node for probe in probes}
    by_node = [[probe for probe in probes if probe.node == node] for node in sorted(nodes)]
    cards = [probe.gpu for probe in probes if probe.gpu is not None]
    return Machines(
        gpu=_gpu(cards) if cards else None,
        ranks=max(map(len, by_node)),
        nodes=len(nodes),
        host_memory=min(min(p.host_available for p in node) + sum(p.host_own for p in node) for node in by_node),
        cores=min(max(p.cores for p in node) for node in by_node),
        shm=min(probe.shm_free for probe in probes),
        disk=min(probe.disk_free for probe in probes),
        disk_rate=(_least(probe.disk_rate for probe in probes) or _DISK_RATE * 1e9) / 1e9,
        gpu_memory=min(_memory(card, len(probes)) for card in cards) if cards else None,
        # Of a card that other processes use too, it is not known what of it is this one's.
        context=max(card.total - card.free - card.reserved for card in cards)
        if cards and all(card.alone for card in cards)
        else None,
        process=max(probe.host_own for probe in probes),
        half_cores=all(probe.computes_bfloat16 for probe in probes),
    )


def measured_rates(request: PlanRequest, probes: Sequence[RankProbe], blocks: Sequence[BlockProbes]) -> Rates:
    """The speeds that the slowest rank measured, and the catalogue's where none did."""
    machines = request.machines
    rates = catalogue_rates(machines)
    cards = [probe.gpu for probe in probes if probe.gpu is not None]
    node = [probe for probe in probes if probe.node == probes[0].node]
    found = {
        "core": sum(probe.core_float32 for probe in node) / machines.cores,
        "half_core": sum(probe.core_bfloat16 for probe in node) / machines.cores,
    }
    for name in ("half", "float32", "memory", "host_link", "peer_link"):
        if least := _least(getattr(card, name) for card in cards):
            found[name] = least
    if not cards:
        found["float32"] = min(probe.core_float32 for probe in probes)
        found["half"] = min(probe.core_bfloat16 for probe in probes)
    for name in ("operation", "launch"):
        if most := max((getattr(probe, name) or 0.0 for probe in probes), default=0.0):
            found[name] = most
    rates = replace(rates, **found)
    on_cores, stored = rates.on_cores(machines), records(request, Placement.GPU)
    widening = widening_seconds(stored, request.teacher_dtype, rates)
    beyond = [one.outside_beyond(rates) for one in blocks]
    return replace(
        rates,
        outside=max((one for one in beyond if one is not None), default=None),
        teacher=max((one.teacher.scale(rates) for one in blocks if one.teacher), default=1.0),
        student=max((one.student.scale(rates) for one in blocks if one.student), default=1.0),
        cores=max((one.cores.scale(on_cores) for one in blocks if one.cores), default=1.0),
        widening=max((one.widening / widening for one in blocks if one.widening and widening), default=1.0),
    )


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value), default=None)


def room_on_gpu(free: int, reserved: int, ranks: int) -> int:
    """Bytes of a GPU for one of a job's ranks: what it has of it, its context too, and what nobody has."""
    return free + reserved + CUDA_CONTEXT + (NCCL_COMMUNICATOR if ranks > 1 else 0)


def _memory(card: GpuProbe, ranks: int) -> int:
    """Bytes of a card without those that other processes hold."""
    return card.total if card.alone else min(room_on_gpu(card.free, card.reserved, ranks), card.total)


def _gpu(cards: Sequence[GpuProbe]) -> Gpu:
    """The catalogue's entry of the slowest card, or one made of what was measured."""
    card = min(cards, key=lambda card: card.half or 0.0)
    reached = all(one.peer_access for one in cards)
    try:
        known = find_gpu(card.name)
        return known if reached else replace(known, peer_kind="host")
    except ConfigError:
        pass
    giga = 1e9
    # The planner takes shares of specified speeds; these are what would be specified.
    half = (card.half or 1e12) / MATRIX_SHARE / 1e12
    link = (card.host_link or giga) / HOST_LINK_SHARE / giga
    return Gpu(
        name=card.name,
        title=card.name,
        memory=card.total,
        usable=card.total,
        bf16=half,
        fp8=None,
        tf32=(card.float32 or card.half or 1e12) / MATRIX_SHARE / 1e12,
        bandwidth=(card.memory or 100 * giga) / TRAFFIC_SHARE / giga,
        host_link=link,
        peer_link=card.peer_link / PEER_LINK_SHARE / giga if card.peer_link else link / 2,
        peer_kind="pcie" if reached else "host",
        capability=card.capability,
        products=(),
        source={"all": "measured at the start of the run"},
    )
