"""Teacher and student draw the same prompts from the same noise, once; everything that is measured comes from that.

Shape names: B batch, C latent channels, F frames (1), H height, W width, L prompt tokens, E embedding size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from wandistill.evaluate.measures import Distance, Stopwatch, VelocityErrors
from wandistill.models.forward import forward
from wandistill.models.sampling import rollout, to_pictures
from wandistill.models.wan import WanFolder
from wandistill.models.wan_text import encode_prompts
from wandistill.teacher.base import Expert, Prompt, Teacher
from wandistill.train.schedule import generator

# Pixels that the VAE decodes at once, since it takes gigabytes for a picture of 832x480: eight of 64x64.
_DECODED_PIXELS = 2**15

Verdict = dict[str, bool]
Judge = Callable[[Tensor, Sequence[str]], list[Verdict | None]]
"""Verdicts on pictures [B, 3, H, W] in -1..1 of their prompts; None where it cannot judge."""


@dataclass(frozen=True)
class Settings:
    """How both draw."""

    teacher_steps: int
    student_steps: int
    teacher_shift: float
    student_shift: float
    guidance: float  # of the high-noise expert
    guidance_low: float
    resolution: tuple[int, int]  # width and height in pixels
    seed: int
    batch_size: int
    velocity_prompts: int  # prompts on whose teacher rollouts the student's velocity is compared
    picture_prompts: int  # prompts whose pictures are kept


@dataclass
class Side:
    """What teacher or student came to."""

    stopwatch: Stopwatch
    verdicts: list[Verdict | None] = field(default_factory=list)
    pictures: list[Image.Image] = field(default_factory=list)
    broken: int = 0  # pictures with values that are not finite

    def look(self, pixels: Tensor, prompts: Sequence[str], judge: Judge | None, keep: int) -> None:
        """Notes pictures [B, 3, 1, H, W]; at most `keep` of all are kept."""
        finite = torch.isfinite(pixels).flatten(1).all(1)
        self.broken += int((~finite).sum())
        pixels = torch.nan_to_num(pixels)
        if judge is not None:
            self.verdicts += judge(pixels[:, :, 0], prompts)
        self.pictures += to_pictures(pixels[: max(keep - len(self.pictures), 0)])


@dataclass
class Comparison:
    """All that was measured."""

    teacher: Side
    student: Side
    decoding: Stopwatch
    velocity: VelocityErrors
    latent: Distance = field(default_factory=Distance)
    pixel: Distance = field(default_factory=Distance)


class Embeddings:
    """Prompt embeddings without their zero tails, padded when asked for: 64 prompts of UMT5-XXL take 20 MB, not 0.5 GB.

    The text encoder is loaded here and freed.
    """

    def __init__(self, folder: WanFolder, prompts: Sequence[str], dtype: torch.dtype, device: torch.device) -> None:
        self._length, self._device = folder.token_length, device
        self._rows: list[Tensor] = []
        tokenizer, encoder = folder.load_tokenizer(), folder.load_text_encoder(dtype, device)
        for start in range(0, len(prompts), 16):
            hidden, lengths = encode_prompts(folder, tokenizer, encoder, prompts[start : start + 16])
            rows = zip(hidden.float().cpu(), lengths.tolist(), strict=True)
            self._rows += [row[:length].clone() for row, length in rows]

    def rows(self, indices: Sequence[int]) -> Tensor:
        """[B, L, E] float32 on the device."""
        padded = [F.pad(self._rows[i], (0, 0, 0, self._length - len(self._rows[i]))) for i in indices]
        return torch.stack(padded).to(self._device)


@dataclass
class Pair:
    """A placed teacher, a student, and what both share: text encoder and VAE are the teacher's."""

    folder: WanFolder
    teacher: Teacher
    student_folder: WanFolder
    student: nn.Module
    embeddings: Embeddings  # of the prompts, then of the negative prompt
    device: torch.device

    @torch.no_grad()
    def compare(
        self, prompts: Sequence[str], settings: Settings, judge: Judge | None, progress: Callable[[int], None]
    ) -> Comparison:
        """Draws all prompts with both; `progress` is told how many more are done."""
        vae = self.folder.load_vae(self.device)
        decoded_at_once = max(1, _DECODED_PIXELS // math.prod(settings.resolution))
        shape = self.folder.latent_shape(*settings.resolution)
        found = Comparison(
            Side(Stopwatch(self.device)),
            Side(Stopwatch(self.device)),
            Stopwatch(self.device),
            VelocityErrors(self.folder.boundary),
        )
        negative = self.embeddings.rows([len(prompts)])
        for indices in _batches(len(prompts), settings.batch_size):
            texts = [prompts[i] for i in indices]
            noise = torch.stack(
                [torch.randn(shape, generator=generator(settings.seed, "evaluate", i)) for i in indices]
            )
            prompt = Prompt(self.embeddings.rows(indices), negative)
            compared = max(min(settings.velocity_prompts - indices[0], len(indices)), 0)
            latents = self._draw(found, noise.to(self.device), prompt, settings, compared)
            found.latent.add(*latents)
            pixels = []
            for one in latents:
                with found.decoding.lap(len(texts)):
                    pixels.append(torch.cat([self.folder.decode(vae, few) for few in one.split(decoded_at_once)]))
            # Distances in 0..1, as pictures are stored.
            found.pixel.add(*(one / 2 for one in pixels))
            for side, drawn in zip((found.teacher, found.student), pixels, strict=True):
                side.look(drawn, texts, judge, settings.picture_prompts)
            progress(len(texts))
        return found

    def _draw(
        self, found: Comparison, noise: Tensor, prompt: Prompt, settings: Settings, compared: int
    ) -> tuple[Tensor, Tensor]:
        """Latents [B, C, 1, H, W] of teacher and student; the first `compared` rollouts also compare velocities."""
        states: list[tuple[float, Tensor, Tensor]] = []

        def teacher_velocity(x: Tensor, t: float) -> Tensor:
            expert = self.folder.expert_for(t)
            guidance = settings.guidance if expert is Expert.HIGH else settings.guidance_low
            times = torch.full((len(x),), t, device=x.device)
            return self.teacher.result(self.teacher.request(x, times, prompt, expert, guidance)).velocity

        def student_velocity(x: Tensor, t: float) -> Tensor:
            times = torch.full((len(x),), t, device=x.device)
            text = prompt.positive[: len(x)]
            expand = self.student_folder.expand_timesteps
            return forward(self.student, x, times, text, expand_timesteps=expand)[0].float()

        with found.teacher.stopwatch.lap(len(noise)):
            teacher = rollout(
                teacher_velocity,
                noise,
                settings.teacher_steps,
                settings.teacher_shift,
                on_step=lambda t, x, v: states.append((t, x[:compared], v[:compared])),
            )
        with found.student.stopwatch.lap(len(noise)):
            student = rollout(student_velocity, noise, settings.student_steps, settings.student_shift)
        if compared:
            for t, x, target in states:
                found.velocity.add(t, self.folder.expert_for(t), student_velocity(x, t), target)
        return teacher, student


def _batches(count: int, size: int) -> Iterator[list[int]]:
    for start in range(0, count, size):
        yield list(range(start, min(start + size, count)))
