"""Drawing pictures: the schedule, Euler's steps along it, and whole folders, equal to diffusers' WanPipeline.

A folder is drawn component by component (text encoder, each expert once, VAE), so that memory holds the largest of
them and not their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch import Tensor, nn

from wandistill.models.forward import forward
from wandistill.models.wan_text import encode_prompts

if TYPE_CHECKING:
    from wandistill.models.wan import WanFolder
    from wandistill.teacher.base import Expert

Velocity = Callable[[Tensor, float], Tensor]
OnStep = Callable[[float, Tensor, Tensor], None]


def flow_times(steps: int, shift: float) -> list[float]:
    """The `steps` + 1 times from 1 to 0 at which sampling evaluates the velocity; the last one only ends it.

    They are the float32 sigmas of `FlowMatchEulerDiscreteScheduler`, which spaces u evenly from 1 down to the shifted
    1/1000 and appends 0, then shifts: t = shift u / (1 + (shift - 1) u).
    """
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas.tolist()


def rollout(velocity: Velocity, noise: Tensor, steps: int, shift: float, on_step: OnStep | None = None) -> Tensor:
    """Euler's method along `flow_times`, from noise [B, C, F, H, W] at t = 1 to latents at t = 0.

    Args:
        velocity: gives v [B, C, F, H, W] of x at t; the state takes its dtype, as in diffusers' scheduler.
        noise: the state at t = 1.
        steps: evaluations of the velocity.
        shift: of the schedule.
        on_step: called with t, the state x and its velocity, before each step.
    """
    x = noise
    times = flow_times(steps, shift)
    # Tensors, as a Python number would be multiplied with half velocities in another precision than diffusers' does.
    lengths = torch.tensor(times, device=noise.device).diff()
    for t, length in zip(times, lengths, strict=False):
        v = velocity(x, t)
        if on_step is not None:
            on_step(t, x, v)
        x = (x.float() + length * v).to(v.dtype)
    return x


def draw_noise(folder: WanFolder, seed: int, resolution: tuple[int, int], frames: int = 1) -> Tensor:
    """The noise [1, C, F, H, W] that WanPipeline draws for one prompt with `torch.Generator().manual_seed(seed)`."""
    shape = folder.latent_shape(*resolution, frames)
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def sample_folder(
    folder: WanFolder,
    prompts: Sequence[str],
    *,
    steps: int,
    resolution: tuple[int, int],
    seed: int = 0,
    noise: Tensor | None = None,
    guidance: float = 1.0,
    guidance_low: float | None = None,
    negative_prompt: str = "",
    shift: float | None = None,
    frames: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    batch_size: int = 1,
) -> Tensor:
    """What a WanPipeline folder draws for prompts, each as WanPipeline draws it alone with Euler's scheduler.

    Args:
        folder: a teacher or an exported student.
        prompts: N of them.
        steps: of sampling.
        resolution: width and height in pixels.
        seed: of the noise, the same for each prompt, so that a picture does not depend on its neighbours.
        noise: [N, C, F, H, W] to use instead.
        guidance: scale of classifier-free guidance; 1: none.
        guidance_low: that of the low-noise expert; None: the same.
        negative_prompt: of the unconditional half.
        shift: of the schedule; None: the folder's own.
        frames: of a video, 1 for a picture.
        dtype: of text encoder and transformer; the VAE decodes in float32.
        device: where everything computes.
        batch_size: prompts in one forward; other sizes than 1 round differently.

    Returns:
        Pixels [N, 3, frames, height, width] in -1..1, float32 on the CPU.
    """
    device = torch.device(device)
    texts = [*prompts, negative_prompt] if guidance > 1.0 else list(prompts)
    embeddings = _encode(folder, texts, dtype, device)
    prompt, negative = embeddings[: len(prompts)], embeddings[len(prompts) :]
    if noise is None:
        noise = draw_noise(folder, seed, resolution, frames).expand(len(prompts), -1, -1, -1, -1)
    experts = _Experts(folder, dtype, device)

    def velocity(x: Tensor, t: float) -> Tensor:
        expert, model = experts.at(t)
        scale = guidance if guidance_low is None or expert == folder.experts[0] else guidance_low
        parts = []
        for chunk, text in zip(x.split(batch_size), prompt.split(batch_size), strict=True):
            times = torch.full((len(chunk),), t, device=device)
            conditional, _ = forward(model, chunk, times, text, expand_timesteps=folder.expand_timesteps)
            if len(negative):
                blank = negative.expand(len(chunk), -1, -1)
                free, _ = forward(model, chunk, times, blank, expand_timesteps=folder.expand_timesteps)
                conditional = free + scale * (conditional - free)
            parts.append(conditional)
        return torch.cat(parts)

    latents = rollout(velocity, noise.to(device), steps, folder.flow_shift if shift is None else shift)
    experts.free()
    vae = folder.load_vae(device)
    return torch.cat([folder.decode(vae, one.float()).cpu() for one in latents.split(1)])


def to_pictures(pixels: Tensor) -> list[Image.Image]:
    """The first frame of each of N drawings [N, 3, frames, H, W] in -1..1, rounded as diffusers rounds."""
    frames = (pixels[:, :, 0] / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float().cpu().numpy()
    return [Image.fromarray(frame) for frame in (frames * 255).round().astype("uint8")]


def _encode(folder: WanFolder, prompts: Sequence[str], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Embeddings [N, L, E], each prompt encoded alone, as padding in a batch may change the last bit."""
    tokenizer, text_encoder = folder.load_tokenizer(), folder.load_text_encoder(dtype, device)
    return torch.cat([encode_prompts(folder, tokenizer, text_encoder, [text])[0] for text in prompts])


class _Experts:
    """The expert that is needed now; times only fall, so each is loaded once."""

    def __init__(self, folder: WanFolder, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._current: tuple[Expert, nn.Module] | None = None

    def at(self, t: float) -> tuple[Expert, nn.Module]:
        expert = self._folder.expert_for(t)
        if self._current is None or self._current[0] != expert:
            self.free()
            self._current = (expert, self._folder.load_transformer(expert, self._dtype, self._device))
        return self._current

    def free(self) -> None:
        self._current = None
