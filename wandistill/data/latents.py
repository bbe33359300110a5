"""Latents x0 from the teacher's own rollouts, and the rollouts' states and velocities where these are wanted.

Shape names: B batch, S steps of a rollout, C latent channels, F frames, H height, W width (latent units).

A rollout's noise is a function of the seed, the prompt and the rollout's number alone. The batch that it is computed
in can change its last bits; batches are of one size and cut as `wandistill.data.building` says, so the same prompts
give the same rollouts on any number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from wandistill.data.building import Compute, Work, fill
from wandistill.data.embeddings import Embeddings
from wandistill.data.store import Store
from wandistill.errors import TrainingFailed
from wandistill.models.sampling import rollout
from wandistill.models.wan import WanFolder
from wandistill.teacher.base import Expert, Prompt, Teacher
from wandistill.train.distributed import World

# Tokens in one forward of the teacher without guidance: 10 pictures of 832x480, 64 of the embedded teacher.
_BATCH_TOKENS = 16_384
_MOST_ROLLOUTS = 64


@dataclass(frozen=True)
class RolloutSettings:
    """What shapes a teacher's rollouts beside teacher and prompt, and what is kept of them."""

    rollouts: int  # of each prompt
    resolution: tuple[int, int]  # width and height in pixels
    steps: int
    shift: float
    guidance: float  # of the high-noise expert
    guidance_low: float  # of the low-noise expert
    negative_prompt: str
    seed: int
    teacher_dtype: str
    keep_states: bool = False  # every step's state, time and guided velocity, for CachedTargets


class RolloutKeys(Sequence[str]):
    """The key of each rollout: its number and its prompt.

    Item i is a rollout of prompt i // rollouts. A prompt that occurs again in the data gets further rollouts: its
    numbers count on, so equal prompts have unequal noise.
    """

    def __init__(self, prompts: Sequence[str], rollouts: int) -> None:
        self._prompts, self._rollouts = prompts, rollouts
        seen: dict[str, int] = {}
        self._occurrence = np.empty(len(prompts), dtype=np.int32)
        for index, prompt in enumerate(prompts):
            self._occurrence[index] = seen[prompt] = seen.get(prompt, -1) + 1

    def __len__(self) -> int:
        return len(self._prompts) * self._rollouts

    @overload
    def __getitem__(self, item: int) -> str: ...
    @overload
    def __getitem__(self, item: slice) -> list[str]: ...
    def __getitem__(self, item: int | slice) -> str | list[str]:
        if isinstance(item, slice):
            return [self[i] for i in range(*item.indices(len(self)))]
        if not 0 <= item < len(self):
            raise IndexError(item)
        index, rollout_number = divmod(int(item), self._rollouts)
        return f"{self._occurrence[index] * self._rollouts + rollout_number}\n{self._prompts[index]}"


class LatentCache:
    """Latents read from disk, by the number of a training item."""

    def __init__(self, store: Store, keys: Sequence[str]) -> None:
        self._store, self._keys = store, keys

    def __len__(self) -> int:
        return len(self._keys)

    def batch(self, items: Sequence[int]) -> Tensor:
        """Normalised latents x0 [B, C, F, H, W], float32 on the CPU."""
        return torch.stack(self._store.read([self._keys[item] for item in items], "x0"))


class CachedTargets(LatentCache):
    """Rollouts whose states and guided velocities were kept."""

    def states(self, items: Sequence[int], draws: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """State x [B, C, F, H, W], time t [B] and guided velocity [B, C, F, H, W] of one step of each rollout.

        Args:
            items: numbers of training items.
            draws: a number of any size for each; modulo S it is the step.
        """
        keys = [self._keys[item] for item in items]
        times = self._store.read(keys, "t")
        steps = [draw % len(own) for draw, own in zip(draws, times, strict=True)]
        x, v = (torch.stack(self._store.read(keys, field, steps)) for field in ("x", "v"))
        return x, torch.stack([own[step] for own, step in zip(times, steps, strict=True)]), v


def rollout_noise(seed: int, prompt: str, number: int, shape: tuple[int, ...]) -> Tensor:
    """The noise of a prompt's rollout, float32 on the CPU: a function of these values alone."""
    digest = hashlib.blake2b(f"{seed}\n{number}\n{prompt}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(shape, generator=generator)


def rollout_work(
    folder: WanFolder,
    prompts: Sequence[str],
    settings: RolloutSettings,
    embedding_ingredients: dict[str, Any],
    cache_dir: Path,
) -> Work:
    """The prompts' rollouts as a cache to be filled; those with states are a cache of their own."""
    shape = folder.latent_shape(*settings.resolution)
    two_experts = len(folder.experts) > 1
    ingredients = {
        "teacher": folder.fingerprint(*(expert.value for expert in folder.experts)),
        "teacher_dtype": settings.teacher_dtype,
        "boundary": folder.boundary,
        "expand_timesteps": folder.expand_timesteps,
        "embeddings": embedding_ingredients,
        "resolution": list(settings.resolution),
        "latent_shape": list(shape),
        "steps": settings.steps,
        "shift": settings.shift,
        "guidance_scale": settings.guidance,
        "guidance_scale_2": settings.guidance_low if two_experts else None,
        "negative_prompt": settings.negative_prompt,
        "seed": settings.seed,
    }
    latent_bytes = 4 * int(np.prod(shape))
    count = 1 + 2 * settings.steps if settings.keep_states else 1
    tokens = folder.architecture.tokens(shape[1:])
    return Work(
        "rollouts with their states" if settings.keep_states else "rollouts",
        Store(cache_dir, "targets" if settings.keep_states else "rollouts", ingredients),
        RolloutKeys(prompts, settings.rollouts),
        max(1, min(_MOST_ROLLOUTS, _BATCH_TOKENS // tokens)),
        lambda _: float(count * latent_bytes),
    )


def build_rollouts(
    work: Work,
    folder: WanFolder,
    teacher: Callable[[], Teacher],
    embeddings: Embeddings,
    settings: RolloutSettings,
    world: World,
) -> LatentCache:
    """Draws the rollouts that are missing, each rank its part, all ranks with equally many requests.

    Args:
        work: what `rollout_work` gave.
        folder: the teacher's folder.
        teacher: gives the placed teacher; called only if a rollout is missing.
        embeddings: of the prompts and of the negative prompt.
        settings: of the rollouts.
        world: the ranks; each calls this.

    Returns:
        The latents; with `settings.keep_states` these are `CachedTargets`.

    Raises:
        TrainingFailed: the teacher's velocity is not finite.
        ConfigError: the disk is full (DoesNotFit), or a rank does not see what the others wrote.
    """

    def begin() -> Compute:
        placed = teacher()
        negative = embeddings.negative(settings.negative_prompt).to(world.device)
        return lambda keys: _draw(folder, placed, keys, embeddings, negative, settings, world.device)

    fill(work, world, begin)
    return (CachedTargets if settings.keep_states else LatentCache)(work.store, work.keys)


@torch.no_grad()
def _draw(
    folder: WanFolder,
    teacher: Teacher,
    keys: list[str],
    embeddings: Embeddings,
    negative: Tensor,
    settings: RolloutSettings,
    device: torch.device,
) -> list[dict[str, Tensor]]:
    """One batch of rollouts: x0, and with `settings.keep_states` also t [S], x and v [S, C, F, H, W] of each."""
    numbers, texts = zip(*(key.split("\n", 1) for key in keys), strict=True)
    shape = folder.latent_shape(*settings.resolution)
    noise = torch.stack(
        [rollout_noise(settings.seed, text, int(number), shape) for number, text in zip(numbers, texts, strict=True)]
    )
    prompt = Prompt(embeddings.batch(texts).to(device), negative)
    times, states, velocities = [], [], []

    def velocity(x: Tensor, t: float) -> Tensor:
        expert = folder.expert_for(t)
        guidance = settings.guidance if expert is Expert.HIGH else settings.guidance_low
        time = torch.full((len(x),), t, device=device)
        return teacher.result(teacher.request(x, time, prompt, expert, guidance)).velocity

    def on_step(t: float, x: Tensor, v: Tensor) -> None:
        if not torch.isfinite(v).all():
            row = int((~torch.isfinite(v.flatten(1)).all(dim=1)).nonzero()[0])
            raise TrainingFailed(
                f"The teacher's velocity is not finite at t = {t:.4f} ({folder.expert_for(t).value}, "
                f"{settings.teacher_dtype}) in the rollout of {texts[row][:80]!r}: Wan overflows in float16 in places; "
                "use --teacher_dtype bfloat16 or float32, or drop the prompt."
            )
        if settings.keep_states:
            times.append(t)
            states.append(x.cpu())
            velocities.append(v.cpu())

    x0 = rollout(velocity, noise.to(device), settings.steps, settings.shift, on_step).cpu()
    items: list[dict[str, Tensor]] = [{"x0": one} for one in x0]
    if settings.keep_states:
        t = torch.tensor(times)
        for item, x, v in zip(items, torch.stack(states, 1), torch.stack(velocities, 1), strict=True):
            item |= {"t": t, "x": x, "v": v}
    return items
