"""Training the judge on drawn scenes. It never sees a two-object caption that the teacher holds out."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from wandistill.demo.judge import Judge, judge_loss, verdicts_of_scenes
from wandistill.demo.recipe import FRAMES, JudgeRecipe
from wandistill.demo.scenes import attributes, draw, sample_numbers
from wandistill.demo.training import CapturedStep, Log, Schedule, adamw, train


def train_judge(recipe: JudgeRecipe, device: torch.device, seed: int, log: Log) -> tuple[Judge, dict[str, Any]]:
    """The trained judge, and how long it took."""
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    judge = Judge().to(device)
    optimizer = adamw(list(judge.parameters()), betas=(0.9, 0.999), weight_decay=0.01)

    def step() -> Tensor:
        numbers = sample_numbers(recipe.batch, generator)
        # Any frame of a clip, but the first one in four of ten pictures, since most are single frames.
        late = torch.rand(recipe.batch, 1, device=device, generator=generator) < 0.6
        times = late * torch.randint(FRAMES, (recipe.batch, 1), device=device, generator=generator).float()
        images = draw(numbers, generator, times=times)[:, :, 0]
        strength = recipe.noise * torch.rand(recipe.batch, 1, 1, 1, device=device, generator=generator)
        images = images + strength * torch.randn(images.shape, device=device, generator=generator)
        loss = judge_loss(judge, images, attributes(numbers))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = CapturedStep(step, generator)
    schedule = Schedule(recipe.steps, recipe.learning_rate, recipe.warmup_steps, recipe.constant_share, floor=0.003)
    stage_time = train("judge", schedule, optimizer, lambda _: captured(), log)
    return judge.eval().requires_grad_(False), asdict(stage_time)


def judge_accuracy(judge: Judge, scenes: int, generator: torch.Generator) -> dict[str, float]:
    """Share of freshly drawn scenes, held-out pairs and single objects, that the judge calls right."""
    numbers = sample_numbers(scenes, generator, held_out=True)
    video = draw(numbers, generator, frames=FRAMES)
    return {
        name: verdicts_of_scenes(judge, video[:, :, frame], numbers)["right"].float().mean().item()
        for name, frame in (("first_frame", 0), ("last_frame", -1))
    }
