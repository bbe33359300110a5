"""Training the text encoder and the transformers by flow matching on the VAE's latents.

Wan's convention: x_t = (1 - t) x0 + t noise, the model predicts the velocity noise - x0, its time input is 1000 t.
Shapes: B samples; latents [B, 16, T', 8, 8], normalised per channel; prompt embeddings [B, 16 tokens, 128].
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import UMT5EncoderModel

from wandistill.demo.captions import all_scenes
from wandistill.demo.recipe import FRAMES, LatentsRecipe, TransformerRecipe
from wandistill.demo.scenes import EMPTY_CAPTION, draw, sample_numbers
from wandistill.demo.tokenizer import PAD_ID, TOKEN_LENGTH, token_ids
from wandistill.demo.training import CapturedStep, Log, Schedule, adamw, train
from wandistill.demo.vae_training import stacked_tap_convolutions

Embed = Callable[[Tensor], Tensor]
"""From scene numbers [B] to prompt embeddings [B, 16, 128]."""


@dataclass(frozen=True)
class Latents:
    """Encoded training scenes (float16, normalised) and their numbers."""

    frames: Tensor
    frame_numbers: Tensor
    clips: Tensor
    clip_numbers: Tensor


@torch.no_grad()
def encode_latents(vae: AutoencoderKLWan, recipe: LatentsRecipe, device: torch.device, seed: int) -> Latents:
    """Draws scenes and encodes them once, so that the transformer's steps needn't."""
    generator = torch.Generator(device).manual_seed(seed)
    mean, std = (
        torch.tensor(values, device=device).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )

    def encode(count: int, batch: int, frames: int) -> tuple[Tensor, Tensor]:
        numbers = sample_numbers(count, generator)
        current = numbers[:batch].clone()

        def step() -> Tensor:
            z = vae.encode(draw(current, generator, frames)).latent_dist.mode()
            return ((z - mean) / std).half()

        captured = CapturedStep(step, generator, warmup_runs=2)
        chunks = []
        for chunk in numbers.split(batch):
            current.copy_(chunk)
            chunks.append(captured().clone())
        return torch.cat(chunks), numbers

    if recipe.frames % recipe.frame_batch or recipe.clips % recipe.clip_batch:
        raise ValueError("The latents' counts must be multiples of their batches.")
    with stacked_tap_convolutions():
        return Latents(*encode(recipe.frames, recipe.frame_batch, 1), *encode(recipe.clips, recipe.clip_batch, FRAMES))


def token_table(device: torch.device) -> Tensor:
    """Token ids [scenes + 1, 16] of each scene's caption; the last row is the empty caption."""
    return torch.tensor([token_ids(scene.caption) for scene in all_scenes()] + [token_ids("")], device=device)


def embed_prompts(text_encoder: UMT5EncoderModel, tokens: Tensor) -> Tensor:
    """As WanPipeline: the encoder's states [B, 16, 128] of the tokens [B, 16], zero after the end token."""
    mask = tokens != PAD_ID
    # A ready 4-D mask: from a 2-D one transformers builds its own and asks the host, which a CUDA graph can't hold.
    bias = torch.zeros(mask.shape, device=tokens.device).masked_fill(~mask, torch.finfo(torch.float32).min)
    bias = bias[:, None, None].expand(-1, 1, TOKEN_LENGTH, TOKEN_LENGTH)
    return text_encoder(input_ids=tokens, attention_mask=bias).last_hidden_state * mask[..., None]


@dataclass(frozen=True)
class TimeRange:
    """Times [low, high] of the flow that a transformer is trained on, drawn uniformly before the shift."""

    low: float
    high: float
    shift: float

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Times [count], t = shift u / (1 + (shift - 1) u) with u uniform between the ends' own u."""
        low, high = (t / (self.shift - (self.shift - 1) * t) for t in (self.low, self.high))
        u = low + (high - low) * torch.rand(count, device=generator.device, generator=generator)
        return self.shift * u / (1 + (self.shift - 1) * u)


def velocity_loss(
    transformer: nn.Module, x0: Tensor, prompt: Tensor, times: TimeRange, generator: torch.Generator
) -> Tensor:
    """Mean squared error of the predicted velocity at random times."""
    t = times.sample(len(x0), generator)
    noise = torch.randn(x0.shape, device=x0.device, generator=generator)
    s = t.view(-1, 1, 1, 1, 1)
    with _bfloat16_on_gpu(x0.device):
        velocity = transformer((1 - s) * x0 + s * noise, t * 1000, prompt, return_dict=False)[0]
    return F.mse_loss(velocity.float(), noise - x0)


def _bfloat16_on_gpu(device: torch.device) -> Any:
    """bfloat16 autocast on a GPU. On CPUs without fast kernels for it it is several times slower than float32."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def compile_blocks(transformer: WanTransformer3DModel) -> None:
    """Compiles the repeated block on a GPU (training step 42 to 20 ms on an H100, captured both times)."""
    if next(transformer.parameters()).is_cuda:
        # Two shapes (frames, clips) for each of three transformers in one process; beyond the limit it runs eagerly.
        torch._dynamo.config.recompile_limit = 32
        transformer.compile_repeated_blocks(dynamic=False)


def train_velocity(
    name: str,
    transformer: WanTransformer3DModel,
    embed: Embed,
    trained: list[nn.Parameter],
    latents: Latents,
    recipe: TransformerRecipe,
    times: TimeRange,
    generator: torch.Generator,
    log: Log,
) -> dict[str, Any]:
    """Trains `trained` in place on frames and clips together and leaves the moving average of the weights in them."""
    started = time.perf_counter()
    device = generator.device
    optimizer = adamw(trained, betas=(0.9, 0.99), weight_decay=0.01)
    averaged = [parameter.detach().clone() for parameter in trained]
    batch = recipe.frame_batch + recipe.clip_batch

    def step() -> Tensor:
        frame = torch.randint(len(latents.frames), (recipe.frame_batch,), device=device, generator=generator)
        clip = torch.randint(len(latents.clips), (recipe.clip_batch,), device=device, generator=generator)
        numbers = torch.cat([latents.frame_numbers[frame], latents.clip_numbers[clip]])
        dropped = torch.rand(batch, device=device, generator=generator) < recipe.caption_dropout
        with _bfloat16_on_gpu(device):
            prompt = embed(torch.where(dropped, EMPTY_CAPTION, numbers))
        frame_prompt, clip_prompt = prompt.split([recipe.frame_batch, recipe.clip_batch])
        loss = velocity_loss(transformer, latents.frames[frame].float(), frame_prompt, times, generator)
        loss = loss + velocity_loss(transformer, latents.clips[clip].float(), clip_prompt, times, generator)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averaged, list(trained), 1 - recipe.ema_decay)
        return loss.detach()

    captured = CapturedStep(step, generator)
    log(f"{name}: step compiled and captured after {time.perf_counter() - started:.0f} s")
    schedule = Schedule(recipe.steps, recipe.learning_rate, recipe.warmup_steps, recipe.constant_share)
    stage_time = train(name, schedule, optimizer, lambda _: captured(), log)
    with torch.no_grad():
        torch._foreach_copy_(list(trained), averaged)
    return asdict(stage_time)
