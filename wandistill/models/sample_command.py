"""`wandistill sample`: pictures from a run, an exported student or a teacher."""

from __future__ import annotations

import argparse
import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from wandistill.config import parse_resolution
from wandistill.data.prompts import read_prompts
from wandistill.errors import ConfigError
from wandistill.models.export import SampleSettings, read_settings
from wandistill.models.sampling import sample_folder, to_pictures
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.models.wan_text import truncated_prompts
from wandistill.train.distributed import choose_device

_log = logging.getLogger(__name__)

_TEACHER_GUIDANCE = 3.0
_TEACHER_STEPS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the folder, the prompts and the settings."""
    parser.add_argument(
        "dir", metavar="DIR", help="a run's output directory, an exported student, a teacher's folder, or 'embedded'"
    )
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="what to draw; may be repeated")
    parser.add_argument("--prompts", metavar="FILE", help="prompts from a .txt, .csv, .jsonl or .parquet file")
    parser.add_argument("--steps", type=int, help="sampling steps (default: the student's own; a teacher: 50)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise, the same for each prompt (default: 0)")
    parser.add_argument(
        "--guidance_scale",
        "--guidance-scale",
        type=float,
        help="scale of classifier-free guidance (default: 1 for a student, which has it in its weights; a teacher: 3)",
    )
    parser.add_argument(
        "--guidance_scale_2",
        "--guidance-scale-2",
        type=float,
        help="that of a teacher's low-noise expert (default: the same)",
    )
    parser.add_argument("--resolution", metavar="WIDTHxHEIGHT", help="pictures' size (default: the student's own)")
    parser.add_argument(
        "--output_dir", "--output-dir", metavar="DIR", help="where pictures go (default: DIR/samples of a run, samples)"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: cuda if present)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of transformer and text encoder (default: the student's own; a teacher: bfloat16 on a GPU, else float32)",
    )


def run(args: argparse.Namespace) -> int:
    """Draws, and prints the pictures' paths; returns 0."""
    folder = open_teacher(str(find_folder(args.dir)))
    device = choose_device(args.device, 0, 1)
    exported = read_settings(folder.path)
    settings = exported or _teacher_settings(folder, device)
    prompts = [*args.prompt, *(read_prompts(Path(args.prompts)) if args.prompts else ())]
    if not prompts:
        raise ConfigError('there is nothing to draw: give --prompt "TEXT" (it may be repeated) or --prompts FILE.')
    for name, least in (("steps", 1), ("guidance_scale", 0), ("guidance_scale_2", 0), ("seed", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise ConfigError(f"--{name} {getattr(args, name)}: must be at least {least}.")
    cut = truncated_prompts(folder, folder.load_tokenizer(), prompts)
    if cut:
        _log.warning(f"note: {len(cut)} of {len(prompts)} prompts have more than {folder.token_length} tokens: cut.")
    guidance = settings.guidance_scale if args.guidance_scale is None else args.guidance_scale
    if exported and guidance > 1:
        _log.warning(f"note: --guidance_scale {guidance:g} guides twice: this student has guidance in its weights.")
    resolution = parse_resolution(args.resolution) if args.resolution else (settings.width, settings.height)
    pixels = sample_folder(
        folder,
        prompts,
        steps=args.steps or settings.steps,
        resolution=resolution,
        seed=args.seed,
        guidance=guidance,
        guidance_low=args.guidance_scale_2,
        shift=settings.flow_shift,
        dtype=getattr(torch, args.dtype or settings.dtype),
        device=device,
    )
    for path in write_pictures(to_pictures(pixels), prompts, args.seed, _output_dir(args)):
        print(path)
    return 0


def find_folder(given: str) -> Path | str:
    """The WanPipeline folder that `given` stands for: of a run's output directory its student, else itself.

    Raises:
        ConfigError: a run that has not exported its student.
    """
    path = Path(given)
    if (path / "model_index.json").is_file():
        return path
    student = path / "student"
    if (student / "model_index.json").is_file():
        return student
    if (path / "run.json").is_file():
        raise ConfigError(
            f"{given}: this run has not exported its student yet; let `wandistill train` finish (the same command "
            f"continues it), or export a checkpoint with `wandistill export {given}`."
        )
    return given


def write_pictures(pictures: Sequence[Image.Image], prompts: Sequence[str], seed: int, folder: Path) -> list[Path]:
    """Writes each picture, named by number, prompt and seed, and grid.png of all if there are several."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for number, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
            words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60].rstrip("-")
            paths.append(folder / f"{number:02d}-{words or 'prompt'}-seed{seed}.png")
            picture.save(paths[-1])
        if len(pictures) > 1:
            paths.append(folder / "grid.png")
            grid(pictures).save(paths[-1])
    except OSError as error:
        raise ConfigError(f"--output_dir {folder}: cannot be written ({error.strerror}); give another.") from error
    return paths


def grid(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures of one size in rows, as nearly square as their number allows."""
    columns = math.ceil(math.sqrt(len(pictures)))
    width, height = pictures[0].size
    sheet = Image.new("RGB", (columns * width, math.ceil(len(pictures) / columns) * height), "white")
    for index, picture in enumerate(pictures):
        sheet.paste(picture, (index % columns * width, index // columns * height))
    return sheet


def _output_dir(args: argparse.Namespace) -> Path:
    if args.output_dir:
        return Path(args.output_dir)
    return Path(args.dir) / "samples" if (Path(args.dir) / "run.json").is_file() else Path("samples")


def _teacher_settings(folder: WanFolder, device: torch.device) -> SampleSettings:
    width, height = (64, 64) if folder.name == "embedded" else (832, 480)
    dtype = "bfloat16" if device.type == "cuda" and folder.name != "embedded" else "float32"
    return SampleSettings(
        _TEACHER_STEPS, width, height, folder.token_length, folder.flow_shift, dtype, guidance_scale=_TEACHER_GUIDANCE
    )
