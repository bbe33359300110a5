"""What the benchmark takes of one way of keeping the teacher: time, memory, bytes that move, and its answers."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wandistill.config import parse_resolution
from wandistill.teacher import Setting
from wandistill.teacher.base import Expert, Prompt
from wandistill.teacher.copy_stream import Copied
from wandistill.teacher.host_memory import HostBuffers
from wandistill.train.distributed import World

# Seconds between two looks at a card.
_LOOK = 0.5
# What a link is measured with, in a row: long enough that starting and ending does not count.
_COPIED, _COPIES = 256 << 20, 16


class Shape(NamedTuple):
    """The samples of one forward of a rank; without guidance there are as many rows."""

    resolution: str
    batch: int
    prompt: int = 512  # tokens


class Ask(NamedTuple):
    """Arguments of one request, on the rank's device."""

    x: Tensor  # [B, C, 1, H, W]
    t: Tensor  # [B]
    prompt: Prompt


Forward = Callable[[Ask], Tensor]  # the velocity [B, C, 1, H, W], float32


def ask_of(setting: Setting, shape: Shape) -> Ask:
    """This rank's request: random, the same in every run."""
    folder, device = setting.folder, setting.world.device
    generator = torch.Generator().manual_seed(setting.world.rank)
    latents = folder.latent_shape(*parse_resolution(shape.resolution))
    x = torch.randn(shape.batch, *latents, generator=generator)
    t = torch.rand(shape.batch, generator=generator)
    prompt = torch.randn(shape.batch, shape.prompt, folder.architecture.text_dim, generator=generator)
    return Ask(x.to(device), t.to(device), Prompt(prompt.to(device), None))


def asked(teacher: Any) -> Forward:
    """A placed teacher's forward, as the training loop asks for it."""

    def forward(ask: Ask) -> Tensor:
        return teacher.result(teacher.request(*ask, Expert.HIGH, 1.0)).velocity

    return forward


class Measured(NamedTuple):
    """Steps in a row."""

    seconds: list[float]
    moved: int  # bytes a step that copy streams of wandistill copied
    velocity: Tensor  # the last answer
    card: Card


class Card:
    """A GPU's mean SM clock and power while it is looked at, twice a second; nothing on a CPU.

    At the limit of its power a card lowers its clock, and what moves bytes takes power too: so a placement may be
    slower than the resident teacher although its copies are hidden.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._looks: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Card:
        if self._device.type == "cuda":
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def row(self, world: World) -> dict[str, Any]:
        """Lists with an entry for each rank, or nothing where a driver does not tell; all ranks call this together."""
        looks = world.gather(self._looks)
        if not all(looks):
            return {}
        means = [[round(sum(values) / len(values), 1) for values in zip(*own, strict=True)] for own in looks]
        return {"sm_clock_mhz": [clock for clock, _ in means], "power_watts": [power for _, power in means]}

    def _watch(self) -> None:
        import pynvml

        with suppress(pynvml.NVMLError):
            while True:
                self._looks.append((torch.cuda.clock_rate(self._device), torch.cuda.power_draw(self._device) / 1000))
                if self._ended.wait(_LOOK):
                    return


@torch.no_grad()
def steady(forward: Forward, ask: Ask, world: World, *, warm_up: int, repeats: int) -> Measured:
    """Times steps that follow each other, as in training: the host asks for the next while one is computed, so what a
    placement brings ahead comes ahead.

    The host is one step ahead at most, as in training, where it reads each step's loss.
    """
    on_gpu = world.device.type == "cuda"

    def mark() -> Any:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    settle(world)
    marks = [mark()]
    with Card(world.device) as card:
        for step in range(warm_up + repeats):
            if step == warm_up:
                before = Copied.size
            velocity = forward(ask)
            marks.append(mark())
            if on_gpu:
                marks[-2].synchronize()
        if on_gpu:
            torch.cuda.synchronize()
    pairs = list(zip(marks[warm_up:], marks[warm_up + 1 :], strict=False))
    seconds = [begin.elapsed_time(end) / 1000 if on_gpu else end - begin for begin, end in pairs]
    return Measured(seconds, (Copied.size - before) // repeats, velocity, card)


class Usage:
    """Memory that a way of keeping the teacher takes, beside what was there before."""

    def __init__(self, world: World) -> None:
        self._world = world
        settle(world)
        self._allocated, self._free, self._host = self._now()
        self._began = time.perf_counter()
        self._load_seconds, self._weights, self._placed, self._held = 0.0, 0, 0, 0

    def placed(self) -> None:
        """Says that the teacher is at its place now."""
        self._load_seconds = time.perf_counter() - self._began
        settle(self._world)
        allocated, free, host = self._now()
        self._weights, self._placed = allocated - self._allocated, self._free - free
        self._held = host - self._host

    def row(self) -> dict[str, Any]:
        """What was taken so far, since `placed` or the row before; all ranks call this together.

        Lists have an entry for each rank: `gpu_weight_bytes` and `gpu_peak_bytes` are torch's numbers, the others the
        driver's, with all that a process has on its GPU. Host memory is that of all ranks together.
        """
        on_gpu = self._world.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        _, free, host = self._now()
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if on_gpu else 0
        ranks = self._world.gather(
            {
                "gpu_weight_bytes": self._weights,
                "gpu_placed_bytes": self._placed,
                "gpu_peak_bytes": peak - self._allocated if on_gpu else 0,
                "gpu_process_bytes": self._free - free,
                "host_bytes": max(host - self._host, self._held),
                "pinned_by_torch_bytes": pinned,
                "load_seconds": self._load_seconds,
            }
        )
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        lists = ("gpu_weight_bytes", "gpu_placed_bytes", "gpu_peak_bytes", "gpu_process_bytes") if on_gpu else ()
        return {
            **{name: [rank[name] for rank in ranks] for name in lists},
            **{name: sum(rank[name] for rank in ranks) for name in ("host_bytes", "pinned_by_torch_bytes")},
            "load_seconds": round(max(rank["load_seconds"] for rank in ranks), 3),
        }

    def _now(self) -> tuple[int, int, int]:
        """Bytes that torch allocated on the GPU, that are free there, and of this process's host memory."""
        if self._world.device.type != "cuda":
            return 0, 0, _host_bytes()
        return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0], _host_bytes()


def settle(world: World) -> None:
    """Ends what is under way, and frees what nobody needs, on all ranks."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    world.barrier()


def spread(seconds: list[float]) -> dict[str, Any]:
    """Median, least, most and number of measurements."""
    return {
        "seconds": round(statistics.median(seconds), 6),
        "least_seconds": round(min(seconds), 6),
        "most_seconds": round(max(seconds), 6),
        "repeats": len(seconds),
    }


def slowest(seconds: list[float], world: World) -> dict[str, Any]:
    """`spread` of the rank that takes longest; all ranks call this together."""
    return max((spread(own) for own in world.gather(seconds)), key=lambda own: own["seconds"])


def host_link(world: World) -> float | None:
    """Bytes a second from page-locked memory to a rank's GPU while all ranks copy, of the slowest; None on a CPU."""
    if world.device.type != "cuda":
        return None
    buffer = HostBuffers(_COPIED, 1, world.device)
    target = torch.empty(_COPIED, dtype=torch.uint8, device=world.device)
    target.copy_(buffer.tensors[0], non_blocking=True)
    settle(world)
    began = time.perf_counter()
    for _ in range(_COPIES):
        target.copy_(buffer.tensors[0], non_blocking=True)
    torch.cuda.synchronize()
    rate = _COPIED * _COPIES / (time.perf_counter() - began)
    buffer.close()
    return min(world.gather(rate))


def _host_bytes() -> int:
    """This process's share of anonymous and shared memory: of a page that two map each has half."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))
