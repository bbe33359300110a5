"""What each optimizer step trains on, as functions of (seed, step, sample number) and of nothing else.

No rank appears here: one rank with a batch of four, two with two and four with one see the same samples with the same
noise. Streams of random numbers are told apart by name, so adding one does not move the others.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import torch
from torch import Tensor

from wandistill.teacher.base import Expert


def generator(seed: int, stream: str, *indices: int) -> torch.Generator:
    """A CPU generator of the stream `stream` of `seed` at `indices`."""
    return torch.Generator().manual_seed(stream_seed(seed, stream, *indices))


def stream_seed(seed: int, stream: str, *indices: int) -> int:
    """A seed of 63 bits; neighbouring indices give unrelated seeds."""
    text = f"{seed}/{stream}/" + "/".join(map(str, indices))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def shifted(u: float | Tensor, shift: float) -> float | Tensor:
    """The time t of u in 0..1 under flow shift k: t = k u / (1 + (k - 1) u) (Wan 2.x, FlowMatchEuler)."""
    return shift * u / (1 + (shift - 1) * u)


def unshifted(t: float, shift: float) -> float:
    """The u of time t: the inverse of `shifted`."""
    return t / (shift - (shift - 1) * t)


def draw_expert(seed: int, step: int, boundary: float | None, shift: float) -> Expert:
    """The expert of an optimizer step, drawn with its probability mass after the shift; t is then drawn within it.

    One draw for all ranks: placements that span ranks bring in one expert's blocks at a time.
    """
    if boundary is None:
        return Expert.HIGH
    u = torch.rand((), generator=generator(seed, "expert", step)).item()
    return Expert.HIGH if u >= unshifted(boundary, shift) else Expert.LOW


def draw_time(seed: int, sample: int, expert: Expert, boundary: float | None, shift: float) -> float:
    """The time t in 0..1 of one sample, uniform in u within its expert's range."""
    u = torch.rand((), generator=generator(seed, "time", sample), dtype=torch.float64).item()
    if boundary is not None:
        edge = unshifted(boundary, shift)
        u = edge + (1 - edge) * u if expert is Expert.HIGH else edge * u
    t = float(shifted(u, shift))
    if boundary is not None:
        # Rounding must not carry a time over the boundary, to the other expert.
        t = max(t, boundary) if expert is Expert.HIGH else min(t, math.nextafter(boundary, 0.0))
    return t


def draw_noise(seed: int, sample: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal noise of one sample, float32 on the CPU."""
    return torch.randn(shape, generator=generator(seed, "noise", sample))


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, items: int) -> Tensor:
    return torch.randperm(items, generator=generator(seed, "order", epoch))


def item_of(seed: int, sample: int, items: int) -> int:
    """The data item of a sample number: every epoch passes over all items in an order of its own."""
    epoch, position = divmod(sample, items)
    return int(_permutation(seed, epoch, items)[position])


def learning_rate(step: int, total: int, peak: float, warmup: int) -> float:
    """The learning rate of optimizer step `step` (from 0): linear warm-up, then cosine to zero at `total`."""
    warmup = min(warmup, max(total // 10, 1))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(total - warmup, 1)
    return peak * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
