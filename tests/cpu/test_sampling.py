"""Sampling: the schedule, Euler's steps, and pictures equal to diffusers' WanPipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

from wandistill.demo import embedded_teacher_path
from wandistill.models.sampling import draw_noise, flow_times, rollout, sample_folder, to_pictures
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.teacher.base import Expert

TinyWan = Callable[[str], Path]


def stock_pipeline(folder: WanFolder) -> WanPipeline:
    """diffusers' own, with Euler's scheduler at the folder's shift."""
    pipeline = WanPipeline.from_pretrained(folder.path, torch_dtype=torch.float32)
    if len(folder.experts) == 1:
        pipeline.register_to_config(boundary_ratio=None)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=folder.flow_shift)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stock_pixels(pipeline: WanPipeline, folder: WanFolder, prompt: str, seed: int = 0, **call: Any) -> np.ndarray:
    """Frames [F, H, W, 3] in 0..1 of one call."""
    generator = torch.Generator().manual_seed(seed)
    output = pipeline(prompt, max_sequence_length=folder.token_length, generator=generator, output_type="np", **call)
    return output.frames[0]


def own_pixels(pixels: torch.Tensor) -> np.ndarray:
    """One drawing [3, F, H, W] in -1..1 as frames [F, H, W, 3] in 0..1."""
    return (pixels / 2 + 0.5).clamp(0, 1).permute(1, 2, 3, 0).numpy()


class TestSchedule:
    @pytest.mark.parametrize("steps", [1, 2, 4, 8, 25, 50])
    @pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0])
    def test_times_are_the_schedulers_sigmas_bit_for_bit(self, steps: int, shift: float):
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(steps)
        assert torch.equal(torch.tensor(flow_times(steps, shift)), scheduler.sigmas)

    @pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
    def test_times_follow_the_published_formula(self, shift: float):
        smallest = shift * 0.001 / (1 + (shift - 1) * 0.001)
        spaced = np.linspace(1, smallest, 9)
        expected = [*(shift * spaced / (1 + (shift - 1) * spaced)), 0]
        np.testing.assert_allclose(flow_times(9, shift), expected, rtol=1e-6)

    def test_times_fall_from_one_to_zero(self):
        times = flow_times(8, 3.0)
        assert times[0] == 1 and times[-1] == 0 and len(times) == 9
        assert times == sorted(times, reverse=True)


class TestRollout:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_states_are_the_schedulers_bit_for_bit(self, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(2, 3, 1, 4, 4, generator=generator)
        velocities = [torch.randn(noise.shape, generator=generator).to(dtype) for _ in range(7)]
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        scheduler.set_timesteps(7)
        expected = noise
        for velocity, timestep in zip(velocities, scheduler.timesteps, strict=True):
            expected = scheduler.step(velocity, timestep, expected, return_dict=False)[0]
        answers = iter(velocities)
        actual = rollout(lambda x, t: next(answers), noise, 7, 3.0)
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)

    def test_a_straight_path_ends_at_its_origin_in_any_number_of_steps(self):
        origin, noise = torch.randn(1, 2, 1, 2, 2), torch.randn(1, 2, 1, 2, 2)
        for steps in (1, 3, 20):
            end = rollout(lambda x, t: noise - origin, noise, steps, 5.0)
            torch.testing.assert_close(end, origin, rtol=1e-5, atol=1e-5)

    def test_every_step_tells_time_state_and_velocity_before_it_moves(self):
        seen: list[tuple[float, torch.Tensor, torch.Tensor]] = []
        noise = torch.ones(1, 1, 1, 1, 1)
        rollout(lambda x, t: x * t, noise, 3, 3.0, on_step=lambda *step: seen.append(step))
        assert [t for t, _, _ in seen] == flow_times(3, 3.0)[:-1]
        assert torch.equal(seen[0][1], noise)
        assert all(torch.equal(v, x * t) for t, x, v in seen)


@pytest.mark.parametrize("kind", ["t2v-1.3b", "t2v-14b", "t2v-a14b", "ti2v-5b"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_pictures_equal_the_stock_pipelines(tiny_wan: TinyWan, kind: str, guidance: float):
    folder = open_teacher(str(tiny_wan(kind)))
    prompts = ["a red circle", "a cat on a blue square"]
    size = 32 if kind != "ti2v-5b" else 64
    own = sample_folder(folder, prompts, steps=3, resolution=(2 * size, size), seed=4, guidance=guidance)
    assert own.shape == (2, 3, 1, size, 2 * size)
    pipeline = stock_pipeline(folder)
    for prompt, pixels in zip(prompts, own, strict=True):
        call = {"height": size, "width": 2 * size, "num_frames": 1, "num_inference_steps": 3}
        expected = stock_pixels(pipeline, folder, prompt, 4, guidance_scale=guidance, **call)
        np.testing.assert_array_equal(own_pixels(pixels), expected)


def test_a_video_and_a_guidance_of_the_low_expert_equal_the_stock_pipelines(tiny_wan: TinyWan):
    folder = open_teacher(str(tiny_wan("t2v-a14b")))
    own = sample_folder(folder, ["a cat"], steps=4, resolution=(32, 32), guidance=4.0, guidance_low=2.0, frames=5)
    call = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4}
    expected = stock_pixels(stock_pipeline(folder), folder, "a cat", guidance_scale=4.0, guidance_scale_2=2.0, **call)
    np.testing.assert_array_equal(own_pixels(own[0]), expected)


def test_the_embedded_teacher_draws_what_the_stock_pipeline_draws_from_its_folder():
    folder = open_teacher("embedded")
    prompt = "a large red circle left of a small blue square on a gray background"
    own = sample_folder(folder, [prompt], steps=4, resolution=(64, 64), guidance=3.0, seed=1)
    pipeline = WanPipeline.from_pretrained(embedded_teacher_path(), torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    call = {"height": 64, "width": 64, "num_frames": 1, "num_inference_steps": 4, "guidance_scale": 3.0}
    np.testing.assert_array_equal(own_pixels(own[0]), stock_pixels(pipeline, folder, prompt, 1, **call))


def test_a_picture_does_not_depend_on_its_neighbours(tiny_wan: TinyWan):
    folder = open_teacher(str(tiny_wan("t2v-a14b")))
    options: dict[str, Any] = {"steps": 2, "resolution": (32, 32), "guidance": 2.0}
    both = sample_folder(folder, ["a red circle", "a cat"], **options)
    assert torch.equal(sample_folder(folder, ["a cat"], **options)[0], both[1])
    batched = sample_folder(folder, ["a red circle", "a cat"], **options, batch_size=2)
    torch.testing.assert_close(batched, both, rtol=0, atol=1e-5)


def test_noise_that_is_given_replaces_the_seeds(tiny_wan: TinyWan):
    folder = open_teacher(str(tiny_wan("t2v-1.3b")))
    noise = draw_noise(folder, 9, (32, 32))
    options: dict[str, Any] = {"steps": 2, "resolution": (32, 32)}
    given = sample_folder(folder, ["a cat"], noise=noise, **options)
    assert torch.equal(given, sample_folder(folder, ["a cat"], seed=9, **options))
    assert not torch.equal(given, sample_folder(folder, ["a cat"], seed=8, **options))


def test_each_expert_is_loaded_once_and_one_at_a_time(tiny_wan: TinyWan, monkeypatch: pytest.MonkeyPatch):
    folder = open_teacher(str(tiny_wan("t2v-a14b")))
    loaded: list[Expert] = []
    original = folder.load_transformer
    monkeypatch.setattr(folder, "load_transformer", lambda e, *rest: (loaded.append(e), original(e, *rest))[1])
    sample_folder(folder, ["a cat", "a red circle", "a blue square"], steps=8, resolution=(32, 32), batch_size=2)
    assert loaded == [Expert.HIGH, Expert.LOW]


def test_pixels_become_pictures_as_diffusers_rounds_them():
    pixels = torch.tensor([-1.2, -1.0, -0.999, 0.0, 0.5, 1.0, 1.3]).view(1, 1, 1, 1, 7).expand(1, 3, 1, 1, 7)
    assert np.asarray(to_pictures(pixels)[0])[0, :, 0].tolist() == [0, 0, 0, 128, 191, 255, 255]
