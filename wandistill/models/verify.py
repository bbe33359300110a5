"""`wandistill verify`: the user's own teacher folder, wandistill's computation against diffusers' WanPipeline."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import torch
from torch import Tensor

from wandistill.errors import ConfigError, ExitCode
from wandistill.models.forward import forward
from wandistill.models.wan import WanFolder, open_teacher, progress_bars_on_terminals
from wandistill.teacher.base import Expert

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Largest relative L2 distance that passes. The operations are the same, so the same bits are expected; a GPU library
# may still choose another kernel for the same call: float32 then differs by a few roundings, half precision by about
# one rounding of bfloat16's 8 bits.
_TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-3}
_LATENT_FRAME = (1, 16, 16)  # frames, height, width of the compared latents
_SEED = 0
# Moving a model there gives its memory back at once, whatever still refers to it.
_RELEASE = "meta"


def verify(folder: WanFolder, dtype: torch.dtype, device: torch.device | str) -> list[dict[str, Any]]:
    """One forward of each expert, through diffusers' WanPipeline and through wandistill, at a t of that expert.

    Both get the same random latents, time and prompt embeddings. The pipeline is diffusers' own, loaded from the folder
    (without text encoder and VAE), and it chooses the expert itself. One expert is in memory at a time.

    Returns:
        One row per expert: `expert`, `t`, `max_abs` and `relative_l2` of the velocities' difference, `ok`.
    """
    rows = []
    for expert in folder.experts:
        t = _time_of(folder, expert)
        x, prompt = _inputs(folder)
        theirs = _pipeline_velocity(folder, expert, dtype, device, x, t, prompt)
        model = folder.load_transformer(expert, dtype, device)
        with torch.no_grad():
            time = torch.tensor([t], dtype=torch.float32, device=device)
            ours, _ = forward(model, x.to(device), time, prompt.to(device), expand_timesteps=folder.expand_timesteps)
        model.to(_RELEASE)
        difference = ours.cpu().double() - theirs.cpu().double()
        relative = (difference.norm() / theirs.double().norm().cpu()).item()
        rows.append(
            {
                "expert": expert.value,
                "t": t,
                "max_abs": difference.abs().max().item(),
                "relative_l2": relative,
                "ok": relative <= _TOLERANCE[dtype],
            }
        )
    return rows


def _time_of(folder: WanFolder, expert: Expert) -> float:
    """The middle of the expert's range of t."""
    if folder.boundary is None:
        return 0.5
    return (folder.boundary + 1) / 2 if expert is Expert.HIGH else folder.boundary / 2


def _inputs(folder: WanFolder) -> tuple[Tensor, Tensor]:
    """Latents [1, C, F, H, W], and prompt embeddings [1, L, E] of which the last quarter is padding."""
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(1, folder.latent_channels, *_LATENT_FRAME, generator=generator)
    prompt = torch.randn(1, folder.token_length, folder.architecture.text_dim, generator=generator)
    prompt[:, folder.token_length * 3 // 4 :] = 0
    return x, prompt


def _pipeline_velocity(
    folder: WanFolder,
    expert: Expert,
    dtype: torch.dtype,
    device: torch.device | str,
    x: Tensor,
    t: float,
    prompt: Tensor,
) -> Tensor:
    """The velocity that the pipeline's own expert gives within a call of one sampling step at `t`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    class OneStep(FlowMatchEulerDiscreteScheduler):
        """A schedule of the single time `t`."""

        def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
            super().set_timesteps(sigmas=[t], device=device)

    others = {other.value: None for other in Expert if other is not expert}
    with progress_bars_on_terminals("diffusers"):
        pipeline = WanPipeline.from_pretrained(
            folder.path,
            dtype=dtype,
            local_files_only=True,
            scheduler=OneStep(shift=1.0),
            boundary_ratio=folder.boundary,
            tokenizer=None,
            text_encoder=None,
            vae=None,
            **others,
        )
    # Not pipeline.to(device), which warns that float16 does not run on a CPU.
    model = getattr(pipeline, expert.value).to(device)
    pipeline.set_progress_bar_config(disable=True)
    velocities: list[Tensor] = []
    model.register_forward_hook(lambda module, args, output: velocities.append(output[0]))
    pipeline(
        latents=x,
        prompt_embeds=prompt.to(device),
        num_inference_steps=1,
        guidance_scale=1.0,
        num_frames=1,
        output_type="latent",
    )
    model.to(_RELEASE)
    (velocity,) = velocities
    return velocity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `wandistill verify`."""
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "--teacher_path",
        "--teacher-path",
        required=True,
        help="a folder in diffusers' WanPipeline layout, a hub id, or 'embedded'",
    )
    parser.add_argument(
        "--teacher_dtype",
        "--teacher-dtype",
        choices=sorted(DTYPES),
        default="bfloat16" if cuda else "float32",
        help="dtype to compare in (default: %(default)s)",
    )
    parser.add_argument("--device", default="cuda" if cuda else "cpu", help="cpu, cuda, cuda:1 (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the error of each expert; 0 if all are within the tolerance, else 3."""
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {args.device} needs a CUDA GPU, and torch sees none here: use --device cpu.")
    folder = open_teacher(args.teacher_path)
    dtype = DTYPES[args.teacher_dtype]
    rows = verify(folder, dtype, args.device)
    ok = all(row["ok"] for row in rows)
    if args.json:
        # JSON has no NaN.
        finite = [
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in row.items()
            }
            for row in rows
        ]
        result = {"schema": 1, "teacher": folder.name, "path": str(folder.path), "dtype": args.teacher_dtype}
        print(json.dumps({**result, "device": args.device, "notes": folder.notes, "experts": finite, "ok": ok}))
    else:
        print(f"{folder.name} in {args.teacher_dtype} on {args.device}, against diffusers' WanPipeline:")
        for note in folder.notes:
            print(f"note: {note}")
        for row in rows:
            print(
                f"{row['expert']:<13} t {row['t']:.4f}  max abs {row['max_abs']:.3g}  "
                f"relative L2 {row['relative_l2']:.3g}  {'ok' if row['ok'] else 'DIFFERS'}"
            )
        if not ok:
            print(f"The relative L2 error may be at most {_TOLERANCE[dtype]:g} in {args.teacher_dtype}.")
    return int(ExitCode.DONE if ok else ExitCode.TRAINING_FAILED)
