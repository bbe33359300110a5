"""How right a packed teacher's pictures are: diffusers' own WanPipeline draws held-out captions, the judge looks."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline
from torch import Tensor

from wandistill.demo.captions import SINGLE_COUNT, heldout_prompts
from wandistill.demo.judge import Judge, verdicts
from wandistill.demo.judge_training import judge_accuracy
from wandistill.demo.recipe import FRAMES, EvaluationRecipe
from wandistill.demo.scenes import IMAGE_SIZE, scene_numbers
from wandistill.demo.tokenizer import TOKEN_LENGTH
from wandistill.demo.training import Log, tf32
from wandistill.demo.vae_training import reconstruction_accuracy

_PROMPT_SEED = 2026


@dataclass(frozen=True)
class Target:
    """A figure that a shipped teacher must reach."""

    name: str
    path: tuple[str, ...]
    """Keys into the result of `evaluate_teacher`."""
    at_least: float


TARGETS = (
    Target("one frame, 50 steps", ("one_frame", "50", "right"), 0.99),
    Target("one frame, 8 steps", ("one_frame", "8", "right"), 0.98),
    Target("last of five frames, 50 steps", ("last_of_five_frames", "50", "right"), 0.97),
    Target("judge on drawn scenes, first frame", ("judge_on_drawn_scenes", "first_frame"), 0.99),
    Target("judge on drawn scenes, last of five frames", ("judge_on_drawn_scenes", "last_frame"), 0.99),
    Target("judge on VAE reconstructions", ("judge_on_reconstructions", "one_frame"), 0.99),
)


def missed_targets(accuracy: dict[str, Any]) -> list[str]:
    """One line for each target that the result of `evaluate_teacher` misses."""
    missed = []
    for target in TARGETS:
        value: Any = accuracy
        for key in target.path:
            value = value[key]
        if value < target.at_least:
            missed.append(f"{target.name}: {value:.2%}, below the target of {target.at_least:.0%}")
    return missed


def load_pipeline(folder: Path, device: torch.device) -> WanPipeline:
    """The teacher in float32."""
    pipeline = WanPipeline.from_pretrained(folder).to(device)
    pipeline.text_encoder.float()  # transformers 5 keeps the files' float16, diffusers itself loads as float32
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw_with_teacher(
    pipeline: WanPipeline, captions: list[str], frames: int, steps: int, guidance_scale: float, batch: int = 128
) -> Tensor:
    """Videos [B, 3, F, 64, 64] in -1..1 on the CPU. The noise is drawn on the CPU: the same on any machine."""
    generator = torch.Generator().manual_seed(0)
    videos = []
    for start in range(0, len(captions), batch):
        video = pipeline(
            captions[start : start + batch],
            height=IMAGE_SIZE,
            width=IMAGE_SIZE,
            num_frames=frames,
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            max_sequence_length=TOKEN_LENGTH,
            generator=generator,
            output_type="pt",
        ).frames  # [B, F, 3, H, W] in 0..1
        videos.append(video.float().cpu().transpose(1, 2) * 2 - 1)
    return torch.cat(videos)


def evaluate_teacher(
    folder: Path, judge: Judge, recipe: EvaluationRecipe, device: torch.device, log: Log
) -> dict[str, Any]:
    """Accuracy of the teacher in `folder`, drawn in float32, and of the judge itself.

    Shares of captions (60 % held-out two-object ones, 40 % single objects) under `one_frame`,
    `first_of_five_frames` and `last_of_five_frames`, then the number of steps, then the judge's questions; `pairs` is
    "right" among the two-object captions, none of which the teacher ever saw.
    """
    started = time.perf_counter()
    captions = heldout_prompts(recipe.captions, seed=_PROMPT_SEED)
    pair = scene_numbers(captions) >= SINGLE_COUNT
    judge = judge.to("cpu")
    result: dict[str, Any] = {"captions": recipe.captions, "guidance_scale": recipe.guidance_scale}

    def measure(name: str, steps: int, images: Tensor) -> None:
        found = verdicts(images, captions, judge)
        shares = {key: value.float().mean().item() for key, value in found.items()}
        shares["pairs"] = found["right"][pair].float().mean().item()
        result.setdefault(name, {})[str(steps)] = shares
        log(f"evaluation: {name}, {steps} steps: {shares['right']:.2%} of {len(captions)} captions right")

    with tf32(False):
        pipeline = load_pipeline(folder, device)
        for steps in recipe.steps:
            video = draw_with_teacher(pipeline, captions, 1, steps, recipe.guidance_scale, recipe.batch)
            measure("one_frame", steps, video[:, :, 0])
            video = draw_with_teacher(pipeline, captions, FRAMES, steps, recipe.guidance_scale, recipe.batch)
            measure("first_of_five_frames", steps, video[:, :, 0])
            measure("last_of_five_frames", steps, video[:, :, -1])
        judge = judge.to(device)
        generator = torch.Generator(device).manual_seed(_PROMPT_SEED)
        result["judged_scenes"] = recipe.judged_scenes
        result["judge_on_drawn_scenes"] = judge_accuracy(judge, recipe.judged_scenes, generator)
        result["judge_on_reconstructions"] = reconstruction_accuracy(
            pipeline.vae, judge, recipe.judged_scenes, generator
        )
    for name in ("judge_on_drawn_scenes", "judge_on_reconstructions"):
        log(f"evaluation: {name}, of {recipe.judged_scenes}: {result[name]}")
    result["seconds"] = round(time.perf_counter() - started, 1)
    return result
