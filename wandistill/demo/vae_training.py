"""Training the VAE, a small AutoencoderKLWan, on drawn frames and clips.

Shapes: B samples, C channels, T frames, H x W pixels; z latents [B, 16, 1 + (T - 1) / 4, H / 8, W / 8].
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from torch import Tensor, nn
from torch.nn import functional as F

from wandistill.demo.judge import Judge, verdicts_of_scenes
from wandistill.demo.recipe import FRAMES, VaeRecipe
from wandistill.demo.scenes import draw, sample_numbers
from wandistill.demo.training import CapturedStep, Log, Schedule, adamw, train


def _convolve_stacked_taps(conv: WanCausalConv3d, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    """WanCausalConv3d.forward as one 2-D convolution over its time taps, stacked as channels.

    The same sums up to their order, but cuDNN's 2-D kernels are about twice as fast as its 3-D ones at these widths
    (training step 37 to 20 ms on an H100).
    """
    taps = conv.kernel_size[0]
    frames_before = conv._padding[4]  # zero frames that causality puts before the first one
    spatial = {"stride": conv.stride[1:], "padding": (conv._padding[2], conv._padding[0])}
    if cache_x is not None and frames_before > 0:
        x = torch.cat([cache_x, x], dim=2)
        frames_before -= cache_x.shape[2]
    if x.shape[2] == 1 and frames_before == taps - 1:
        # A lone frame after nothing but zeros: only the last tap sees it.
        return F.conv2d(x[:, :, 0], conv.weight[:, :, -1], conv.bias, **spatial).unsqueeze(2)
    if frames_before > 0:
        x = F.pad(x, (0, 0, 0, 0, frames_before, 0))
    windows = x.unfold(2, taps, conv.stride[0])  # [B, C, T', H, W, taps]
    batch, _, frames = windows.shape[:3]
    stacked = windows.permute(0, 2, 5, 1, 3, 4).flatten(2, 3).flatten(0, 1)  # [B T', taps C, H, W]
    weight = conv.weight.transpose(1, 2).flatten(1, 2)  # [out, taps C, kernel, kernel]
    return F.conv2d(stacked, weight, conv.bias, **spatial).unflatten(0, (batch, frames)).transpose(1, 2)


@contextmanager
def stacked_tap_convolutions() -> Iterator[None]:
    """Within, every WanCausalConv3d computes as `_convolve_stacked_taps`."""
    original = WanCausalConv3d.forward
    WanCausalConv3d.forward = _convolve_stacked_taps
    try:
        yield
    finally:
        WanCausalConv3d.forward = original


def decode_unclamped(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """`vae.decode` without its final clamp to -1..1, which gives saturated pixels no gradient to come back by."""
    vae.clear_cache()
    hidden = vae.post_quant_conv(latents)
    chunks = []
    for i in range(latents.shape[2]):
        vae._conv_idx = [0]
        first = {"first_chunk": True} if i == 0 else {}
        chunks.append(vae.decoder(hidden[:, :, i : i + 1], feat_cache=vae._feat_map, feat_idx=vae._conv_idx, **first))
    vae.clear_cache()
    return torch.cat(chunks, dim=2)


def vae_loss(vae: AutoencoderKLWan, video: Tensor, recipe: VaeRecipe, generator: torch.Generator) -> Tensor:
    """L1 + L2 reconstruction error, weighted towards the objects, and a little of the KL divergence to N(0, 1)."""
    posterior = vae.encode(video).latent_dist
    noise = torch.randn(posterior.mean.shape, device=video.device, generator=generator)
    error = decode_unclamped(vae, posterior.mean + posterior.std * noise) - video
    # The corner pixel is background: objects never reach it.
    on_object = (video - video[:, :, :, :1, :1]).abs().amax(dim=1, keepdim=True) > 0.15
    weight = 1 + (recipe.object_weight - 1) * on_object.float()
    kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
    return (weight * (error.abs() + error**2)).mean() + recipe.kl_weight * kl


def train_vae(
    config: dict[str, Any], recipe: VaeRecipe, device: torch.device, seed: int, log: Log
) -> tuple[AutoencoderKLWan, dict[str, Any]]:
    """The trained VAE, how long it took, and its latents' mean and standard deviation per channel.

    Plain float32 with TF32: under bfloat16 autocast it never learnt to draw the objects.
    """
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    vae = AutoencoderKLWan(**config).to(device)
    parameters: list[nn.Parameter] = list(vae.parameters())
    optimizer = adamw(parameters, betas=(0.9, 0.95), weight_decay=0.0)

    def captured_step(batch: int, frames: int) -> CapturedStep:
        def step() -> Tensor:
            video = draw(sample_numbers(batch, generator), generator, frames)
            loss = vae_loss(vae, video, recipe, generator)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            return loss.detach()

        return CapturedStep(step, generator)

    with stacked_tap_convolutions():
        clip_step = captured_step(recipe.clip_batch, FRAMES)
        frame_step = captured_step(recipe.frame_batch, 1)
        log("vae: steps captured")

        def step(i: int) -> Tensor:
            clips = i >= recipe.clips_after * recipe.steps and i % 2 == 1
            return clip_step() if clips else frame_step()

        schedule = Schedule(recipe.steps, recipe.learning_rate, recipe.warmup_steps, recipe.constant_share)
        stage_time = train("vae", schedule, optimizer, step, log)

    vae.eval().requires_grad_(False)
    mean, std = _latent_statistics(vae, recipe.latent_samples, generator)
    return vae, {**asdict(stage_time), "latents_mean": mean, "latents_std": std}


@torch.no_grad()
def _latent_statistics(
    vae: AutoencoderKLWan, samples: int, generator: torch.Generator
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each of the 16 latent channels over `samples` frames and half as many clips."""
    latents = []
    for frames, count in ((1, samples), (FRAMES, samples // 2)):
        for numbers in sample_numbers(count, generator).split(64):
            z = vae.encode(draw(numbers, generator, frames)).latent_dist.mode()
            latents.append(z.transpose(0, 1).flatten(1))
    flat = torch.cat(latents, dim=1)
    return flat.mean(1).tolist(), flat.std(1).tolist()


@torch.no_grad()
def reconstruction_accuracy(
    vae: AutoencoderKLWan, judge: Judge, scenes: int, generator: torch.Generator
) -> dict[str, float]:
    """Share of held-out drawn scenes that the judge still calls right after the VAE: one frame, a clip's last."""
    result = {}
    for name, frames in (("one_frame", 1), ("last_of_five_frames", FRAMES)):
        right = []
        for numbers in sample_numbers(scenes, generator, held_out=True).split(64):
            video = draw(numbers, generator, frames)
            decoded = vae.decode(vae.encode(video).latent_dist.mode()).sample
            right.append(verdicts_of_scenes(judge, decoded[:, :, -1], numbers)["right"])
        result[name] = torch.cat(right).float().mean().item()
    return result
