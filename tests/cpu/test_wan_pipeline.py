"""wandistill's forward and its choice of expert against diffusers' own WanPipeline, on tiny folders of each layout."""

from __future__ import annotations

import pytest
import torch

from wandistill.models.forward import forward
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.teacher.base import Expert

KINDS = ["t2v-1.3b", "t2v-14b", "t2v-a14b", "ti2v-5b"]


class Call:
    """One call of a transformer within a pipeline's run."""

    def __init__(self, expert: Expert, inputs: dict, velocity: torch.Tensor) -> None:
        self.expert, self.velocity = expert, velocity
        self.x, self.timestep, self.prompt = (
            inputs[name] for name in ("hidden_states", "timestep", "encoder_hidden_states")
        )


def run_pipeline(folder: WanFolder, *, dtype, scheduler=None, steps=4, frames=1, batch=2, guidance=1.0):
    """Samples with diffusers' WanPipeline; returns its calls of the transformers and the scheduler."""
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(
        folder.path,
        dtype=dtype,
        boundary_ratio=folder.boundary,
        vae=None,
        text_encoder=None,
        tokenizer=None,
        **({} if scheduler is None else {"scheduler": scheduler}),
    )
    pipeline.set_progress_bar_config(disable=True)
    calls: list[Call] = []
    for expert in folder.experts:
        getattr(pipeline, expert.value).register_forward_hook(
            lambda module, args, inputs, output, expert=expert: calls.append(Call(expert, inputs, output[0].clone())),
            with_kwargs=True,
        )
    generator = torch.Generator().manual_seed(1)
    shape = folder.latent_shape(64, 64, frames)
    prompt = torch.randn(batch, 12, folder.architecture.text_dim, generator=generator)
    pipeline(
        latents=torch.randn(batch, *shape, generator=generator),
        prompt_embeds=prompt,
        negative_prompt_embeds=torch.zeros_like(prompt),
        num_inference_steps=steps,
        num_frames=frames,
        guidance_scale=guidance,
        output_type="latent",
    )
    return calls, pipeline.scheduler


def euler(shift: float):
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=shift)


@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_velocity_is_the_pipelines_to_the_bit(tiny_wan, kind, dtype, frames):
    folder = open_teacher(str(tiny_wan(kind)))
    calls, scheduler = run_pipeline(folder, dtype=dtype, scheduler=euler(3.0), frames=frames)
    assert {call.expert for call in calls} == set(folder.experts)
    assert all(call.timestep.ndim == (2 if folder.expand_timesteps else 1) for call in calls)
    models = {expert: folder.load_transformer(expert, dtype, "cpu") for expert in folder.experts}
    for call, sigma in zip(calls, scheduler.sigmas, strict=False):
        with torch.no_grad():
            velocity, _ = forward(
                models[folder.expert_for(sigma.item())],
                call.x,
                sigma.repeat(len(call.x)),
                call.prompt,
                expand_timesteps=folder.expand_timesteps,
            )
        assert torch.equal(velocity, call.velocity)


@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_the_pipeline_takes_the_same_expert_for_the_same_t(tiny_wan, shift, guidance):
    folder = open_teacher(str(tiny_wan("t2v-a14b")))
    calls, _ = run_pipeline(folder, dtype=torch.float32, scheduler=euler(shift), steps=16, guidance=guidance)
    assert [call.expert for call in calls] == [folder.expert_for(call.timestep[0].item() / 1000) for call in calls]
    assert {call.expert for call in calls} == {Expert.HIGH, Expert.LOW}


def test_the_pipeline_takes_the_same_expert_with_the_folders_own_scheduler(tiny_wan):
    folder = open_teacher(str(tiny_wan("t2v-a14b")))
    calls, scheduler = run_pipeline(folder, dtype=torch.float32, steps=16)
    assert type(scheduler).__name__ == "UniPCMultistepScheduler"
    assert [call.expert for call in calls] == [folder.expert_for(call.timestep[0].item() / 1000) for call in calls]


@pytest.mark.parametrize("sigma", [0.875, 0.87499994, 0.87500006])
def test_the_pipeline_takes_the_same_expert_at_the_boundary_itself(tiny_wan, sigma):
    from diffusers import FlowMatchEulerDiscreteScheduler

    class OneStep(FlowMatchEulerDiscreteScheduler):
        def set_timesteps(self, num_inference_steps, device=None):
            super().set_timesteps(sigmas=[sigma], device=device)

    folder = open_teacher(str(tiny_wan("t2v-a14b")))
    (call,), scheduler = run_pipeline(folder, dtype=torch.float32, scheduler=OneStep(shift=1.0), steps=1)
    assert call.expert is folder.expert_for(scheduler.sigmas[0].item()) is folder.expert_for(sigma)
    assert call.expert is (Expert.LOW if sigma < 0.875 else Expert.HIGH)


def test_one_expert_serves_every_t_although_the_folder_has_a_boundary_ratio(tiny_wan):
    folder = open_teacher(str(tiny_wan("t2v-14b")))
    calls, _ = run_pipeline(folder, dtype=torch.float32, steps=8)
    assert {call.expert for call in calls} == {folder.expert_for(t / 10) for t in range(11)} == {Expert.HIGH}
