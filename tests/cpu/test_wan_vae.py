"""Latents to pixels and back, against diffusers' WanPipeline."""

from __future__ import annotations

import pytest
import torch

from wandistill.models.wan import open_teacher

PROMPT = "a large red circle on a gray background"


def sample_pipeline(folder, prompt, frames):
    """A few steps of the folder's WanPipeline: the last latents and the pictures in 0..1."""
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(folder.path, dtype=torch.float32, boundary_ratio=folder.boundary)
    pipeline.set_progress_bar_config(disable=True)
    last = {}

    def keep(pipeline, step, timestep, tensors):
        last.update(tensors)
        return tensors

    frames = pipeline(
        prompt,
        height=64,
        width=64,
        num_frames=frames,
        num_inference_steps=3,
        guidance_scale=1.0,
        max_sequence_length=folder.token_length,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        callback_on_step_end=keep,
    ).frames
    return last["latents"], frames


@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.parametrize("kind", ["embedded", "t2v-a14b", "ti2v-5b"])
def test_decoding_gives_the_pipelines_pictures(tiny_wan, kind, frames):
    folder = open_teacher("embedded" if kind == "embedded" else str(tiny_wan(kind)))
    latents, pictures = sample_pipeline(folder, [PROMPT], frames)
    assert latents.shape[1:] == folder.latent_shape(64, 64, frames)
    pixels = folder.decode(folder.load_vae("cpu"), latents)
    assert pixels.shape == (1, 3, frames, 64, 64)
    assert pixels.min() >= -1 and pixels.max() <= 1
    assert torch.equal((pixels * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 1, 3, 4), pictures)


def test_a_decoder_that_exceeds_the_pictures_range_is_clamped():
    folder = open_teacher("embedded")
    vae = folder.load_vae("cpu")
    vae.decoder.conv_out.weight *= 50
    pixels = folder.decode(vae, torch.randn(1, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert (pixels.min(), pixels.max()) == (-1, 1)


@pytest.mark.parametrize("frames", [1, 5])
def test_encoding_gives_back_the_latents_of_a_drawn_picture(frames):
    folder = open_teacher("embedded")
    vae = folder.load_vae("cpu")
    latents, _ = sample_pipeline(folder, [PROMPT], frames)
    pixels = folder.decode(vae, latents)
    again = folder.encode(vae, pixels)
    assert again.shape == latents.shape
    assert (folder.decode(vae, again) - pixels).abs().mean() < 0.05


@pytest.mark.parametrize("kind", ["embedded", "t2v-14b", "ti2v-5b"])
def test_encoded_latents_are_normalised_as_the_decoder_expects(tiny_wan, kind):
    folder = open_teacher("embedded" if kind == "embedded" else str(tiny_wan(kind)))
    vae = folder.load_vae("cpu")
    pixels = torch.rand(2, 3, 5, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = folder.encode(vae, pixels)
    assert latents.shape[1:] == folder.latent_shape(64, 64, 5)
    mode = vae.encode(pixels).latent_dist.mode()
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    torch.testing.assert_close(latents * std + mean, mode, rtol=1e-5, atol=1e-5)


def test_the_embedded_teachers_latents_have_about_unit_variance():
    folder = open_teacher("embedded")
    latents, _ = sample_pipeline(folder, [PROMPT, "a small blue square on a white background"], 1)
    assert 0.3 < latents.std() < 3
