"""The micro-batches of an optimizer step on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wandistill.config import TrainConfig
from wandistill.teacher.base import Expert, Prompt
from wandistill.train.distributed import World
from wandistill.train.schedule import draw_expert, draw_noise, draw_time, generator, item_of, unshifted


class TrainingData(Protocol):
    """What the caches give: see `wandistill.data.prepare`."""

    negative: Tensor  # [1, L, E]

    def __len__(self) -> int: ...

    def batch(self, items: list[int]) -> tuple[Tensor, Tensor]:
        """Latents x0 [B, C, F, H, W] and prompt embeddings [B, L, E] of data items."""
        ...

    def states(self, items: list[int], draws: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """State x [B, C, F, H, W], time t [B] and guided velocity of the rollout step that each draw picks."""
        ...


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the rank's device. It always has `--batch_size` rows: past the end of the data rows repeat
    and weigh nothing, so shapes never change and every rank makes the same requests."""

    samples: list[int]  # global sample numbers
    x: Tensor  # noisy latents [B, C, F, H, W]
    t: Tensor  # times in 0..1 [B]
    prompt: Prompt
    weight: Tensor  # 1 or 0 [B]
    velocity: Tensor | None  # the cached target, when no teacher is asked


@dataclass(frozen=True)
class Step:
    """What one optimizer step trains on, here and on all ranks together."""

    expert: Expert
    batches: list[Batch]
    samples: int  # real samples of all ranks


class Sampler:
    """Deals the samples of every step out to the ranks.

    Args:
        total_samples: samples of the whole run; the last step may have fewer than the others.
        boundary: the experts' boundary in t, or None.
        shift: the flow shift of training times.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        data: TrainingData,
        *,
        total_samples: int,
        boundary: float | None,
        shift: float,
    ) -> None:
        self._config, self._world, self._data = config, world, data
        self._total, self._boundary, self._shift = total_samples, boundary, shift
        self._per_rank = config.batch_size * config.gradient_accumulation_steps
        self.global_batch = self._per_rank * world.size

    def step(self, step: int) -> Step:
        """The micro-batches of optimizer step `step` (from 0) on this rank."""
        config, world = self._config, self._world
        first = step * self.global_batch
        expert = draw_expert(config.seed, step, self._boundary, self._shift)
        batches = []
        for micro in range(config.gradient_accumulation_steps):
            begin = first + (micro * world.size + world.rank) * config.batch_size
            batches.append(self._batch(list(range(begin, begin + config.batch_size)), expert))
        return Step(expert, batches, min(self.global_batch, self._total - first))

    def probes(self, count: int) -> list[tuple[Expert, Batch]]:
        """`count` batches to measure initialisations with, spread over the experts by their mass, at least one each.

        Their sample numbers lie beyond any run's, so nothing that is trained on is seen before.
        """
        high = count
        if self._boundary is not None:
            mass = 1 - unshifted(self._boundary, self._shift)
            high = min(max(round(count * mass), 1), count - 1)
        size = self._config.batch_size
        probes = []
        for index in range(count):
            expert = Expert.HIGH if index < high else Expert.LOW
            begin = 2**40 + index * size
            probes.append((expert, self._batch(list(range(begin, begin + size)), expert)))
        return probes

    def _batch(self, samples: list[int], expert: Expert) -> Batch:
        config, device = self._config, self._world.device
        weight = torch.tensor([float(sample < self._total) for sample in samples])
        items = [item_of(config.seed, sample, len(self._data)) for sample in samples]
        clean, positive = self._data.batch(items)
        velocity = None
        if config.targets == "cached":
            draws = [
                int(torch.randint(2**31, (), generator=generator(config.seed, "state", sample))) for sample in samples
            ]
            x, t, velocity = self._data.states(items, draws)
        else:
            times = [draw_time(config.seed, sample, expert, self._boundary, self._shift) for sample in samples]
            t = torch.tensor(times, dtype=torch.float32)
            noise = torch.stack([draw_noise(config.seed, sample, tuple(clean.shape[1:])) for sample in samples])
            x = torch.lerp(clean.float(), noise, t.view(-1, 1, 1, 1, 1))

        def place(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

        return Batch(
            samples,
            place(x),
            place(t),
            Prompt(place(positive.float()), self._data.negative.to(device)),
            place(weight),
            None if velocity is None else place(velocity.float()),
        )
