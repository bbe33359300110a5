"""A finished run's student against its teacher, on prompts that it was not trained on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wandistill import teacher as placement
from wandistill.config import TrainConfig, parse_resolution
from wandistill.demo import embedded_teacher_path
from wandistill.demo.captions import scene_number
from wandistill.demo.judge import verdicts
from wandistill.demo.scenes import IMAGE_SIZE
from wandistill.errors import ConfigError
from wandistill.evaluate.measures import finite_or_none
from wandistill.evaluate.pairs import Comparison, Embeddings, Pair, Settings, Side, Verdict
from wandistill.evaluate.prompts import EvaluationPrompts, choose_prompts
from wandistill.evaluate.rundir import (
    EVALUATION_FILE,
    PICTURES_FILE,
    PICTURES_FOLDER,
    RunDirectory,
    cannot_write,
    read_finished_run,
    student_key,
    write_text_atomically,
)
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.train.distributed import World, choose_device
from wandistill.train.progress import Progress

# Prompts on whose rollouts the velocities are compared: every state of a rollout counts, so few prompts are enough.
_VELOCITY_PROMPTS = 128
# Pairs of pictures that are kept for the report.
_PICTURES = 12
# Tokens of latents in one batch, unless --batch_size says otherwise: 64 pictures of 64x64, one of 832x480.
_BATCH_TOKENS = 1024


@dataclass(frozen=True)
class Options:
    """What `wandistill evaluate` can be told."""

    prompts: Path | None = None
    column: str = ""
    count: int | None = None
    steps: int | None = None  # None: the student's own number, the run's --sample_steps
    teacher_steps: int | None = None  # None: the larger of `steps` and the run's --rollout_steps
    seed: int = 0
    device: str = "auto"
    batch_size: int | None = None
    teacher_path: str | None = None


def evaluate(run_dir: Path, options: Options | None = None) -> dict[str, Any]:
    """Compares, writes evaluation.json and the pictures in evaluation/ below `run_dir`, and returns the figures.

    Both draw every prompt from the same noise: the teacher with the run's guidance, the student without, since
    guidance is folded into it. The figures (`schema` 1):

    - teacher_parameters (all experts), teacher_expert_parameters (one), student_parameters: of the transformers;
    - teacher_accuracy, student_accuracy: share of captions wholly right by the judge, with the embedded teacher;
      `judge` has the shares of its questions;
    - velocity_error: of the student against the guided teacher on the states of the teacher's rollouts, as relative L2
      and mean square, whole, `by_t` and `by_expert`;
    - latent_distance, pixel_distance: root mean square of paired results (normalised latents; pixels in 0..1), and
      beside each `..._unrelated`: the same between the teacher's results for different prompts;
    - teacher_seconds_per_image, student_seconds_per_image: of sampling, without decode_seconds_per_image.

    Raises:
        ConfigError: no finished run, a teacher that is not to be found, or options that cannot be.
    """
    options = options or Options()
    run = read_finished_run(run_dir)
    config = run.config
    named = options.teacher_path
    folder = open_teacher(named) if named else open_teacher(config.teacher_path, config.teacher_revision)
    student_folder = open_teacher(str(run.student))
    _require_match(folder, student_folder)
    embedded = folder.path.resolve() == embedded_teacher_path().resolve()
    chosen = choose_prompts(
        config,
        embedded=embedded,
        file=options.prompts,
        column=options.column,
        count=options.count,
        seed=options.seed,
    )
    device = choose_device(options.device, 0, 1)
    settings = _settings(config, folder, student_folder, options)
    judged = embedded and settings.resolution == (IMAGE_SIZE, IMAGE_SIZE)
    pair, dtypes = _load(config, folder, student_folder, chosen.prompts, device)
    with Progress("evaluating", len(chosen.prompts)) as progress:
        found = pair.compare(chosen.prompts, settings, _judge if judged else None, progress.update)
    pair.teacher.close()
    result = {
        **_conditions(chosen, settings, folder, device, dtypes),
        "student_key": student_key(run.student),
        **_accuracies(found),
        "teacher_parameters": folder.architecture.parameters * len(folder.experts),
        "teacher_expert_parameters": folder.architecture.parameters,
        "student_parameters": sum(p.numel() for p in pair.student.parameters()),
        **_figures(found),
        "notes": [*chosen.notes, *_notes(found, judged, embedded, len(chosen.prompts))],
    }
    result = finite_or_none(result)
    _write(run, result, chosen.prompts, found)
    return result


def _require_match(folder: WanFolder, student: WanFolder) -> None:
    """Both must live in the same latents and read the same embeddings, or comparing them means nothing."""
    ours, theirs = student.architecture, folder.architecture
    same = (
        ("latent channels", ours.in_channels, theirs.in_channels),
        ("prompt embedding size", ours.text_dim, theirs.text_dim),
        ("latents' mean", student.latents_mean, folder.latents_mean),
        ("token length", student.token_length, folder.token_length),
    )
    for what, student_value, teacher_value in same:
        if student_value != teacher_value:
            raise ConfigError(
                f"--teacher_path {folder.name}: its {what} is {teacher_value}, the student's is {student_value}; give "
                "the teacher that the student was distilled from."
            )


def _settings(config: TrainConfig, folder: WanFolder, student: WanFolder, options: Options) -> Settings:
    steps = options.steps if options.steps is not None else config.sample_steps
    teacher_steps = options.teacher_steps if options.teacher_steps is not None else max(steps, config.rollout_steps)
    resolution = parse_resolution(config.resolution)
    tokens = folder.architecture.tokens(folder.latent_shape(*resolution)[1:])
    fitting = max(1, min(64, _BATCH_TOKENS // tokens))
    batch_size = options.batch_size if options.batch_size is not None else fitting
    for name, value in (("steps", steps), ("teacher_steps", teacher_steps), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"--{name} {value}: must be at least 1.")
    return Settings(
        teacher_steps=teacher_steps,
        student_steps=steps,
        teacher_shift=config.flow_shift or folder.flow_shift,
        student_shift=student.flow_shift,
        guidance=config.guidance_scale,
        guidance_low=config.guidance_low,
        resolution=resolution,
        seed=options.seed,
        batch_size=batch_size,
        velocity_prompts=_VELOCITY_PROMPTS,
        picture_prompts=_PICTURES,
    )


def _load(
    config: TrainConfig, folder: WanFolder, student_folder: WanFolder, prompts: Sequence[str], device: torch.device
) -> tuple[Pair, dict[str, str]]:
    """Teacher and student on the device, the text encoder used and freed before; and the dtypes of both."""
    on_gpu = device.type == "cuda"
    teacher_name = config.dtype_on(device.type)
    student_name = (
        {"bf16": "bfloat16", "fp16": "float16"}.get(config.mixed_precision, "float32") if on_gpu else "float32"
    )
    dtype = placement.DTYPES[teacher_name]
    embeddings = Embeddings(folder, [*prompts, config.negative_prompt], dtype, device)
    resident = replace(config, teacher_device_strategy="gpu", device=device.type)
    teacher = placement.place(placement.Setting(resident, folder, dtype, World(0, 1, 0, 1, device)))
    student = student_folder.load_transformer(student_folder.experts[0], placement.DTYPES[student_name], device)
    pair = Pair(folder, teacher, student_folder, student, embeddings, device)
    return pair, {"teacher_dtype": teacher_name, "student_dtype": student_name}


def _judge(images: Tensor, prompts: Sequence[str]) -> list[Verdict | None]:
    """The shipped judge's verdicts; None for a prompt that is no caption of its scenes."""
    known = [index for index, prompt in enumerate(prompts) if _is_scene(prompt)]
    found: list[Verdict | None] = [None] * len(prompts)
    if known:
        answers = {key: value.tolist() for key, value in verdicts(images[known], [prompts[i] for i in known]).items()}
        for place, index in enumerate(known):
            found[index] = {key: answer[place] for key, answer in answers.items()}
    return found


def _is_scene(prompt: str) -> bool:
    try:
        scene_number(prompt)
    except ValueError:
        return False
    return True


def _conditions(
    chosen: EvaluationPrompts, settings: Settings, folder: WanFolder, device: torch.device, dtypes: dict[str, str]
) -> dict[str, Any]:
    """Under which the figures hold."""
    return {
        "schema": 1,
        "teacher": folder.name,
        "prompts": len(chosen.prompts),
        "prompt_source": chosen.source,
        "prompts_in_training_data": chosen.seen,
        "resolution": list(settings.resolution),
        "steps": settings.student_steps,
        "teacher_steps": settings.teacher_steps,
        "guidance_scale": settings.guidance,
        "guidance_scale_2": settings.guidance_low,
        "flow_shift": settings.teacher_shift,
        "boundary": folder.boundary,
        "seed": settings.seed,
        "batch_size": settings.batch_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        **dtypes,
    }


def _accuracies(found: Comparison) -> dict[str, Any]:
    shares = {name: _shares(side) for name, side in (("teacher", found.teacher), ("student", found.student))}
    if not all(shares.values()):
        return {}
    return {
        "teacher_accuracy": shares["teacher"]["right"],
        "student_accuracy": shares["student"]["right"],
        "judge": shares,
    }


def _shares(side: Side) -> dict[str, float]:
    judged = [verdict for verdict in side.verdicts if verdict is not None]
    return {key: sum(verdict[key] for verdict in judged) / len(judged) for key in judged[0]} if judged else {}


def _figures(found: Comparison) -> dict[str, Any]:
    return {
        "teacher_seconds_per_image": found.teacher.stopwatch.seconds_per_image,
        "student_seconds_per_image": found.student.stopwatch.seconds_per_image,
        "decode_seconds_per_image": found.decoding.seconds_per_image,
        "latent_distance": found.latent.paired,
        "latent_distance_unrelated": found.latent.unrelated,
        "pixel_distance": found.pixel.paired,
        "pixel_distance_unrelated": found.pixel.unrelated,
        "velocity_error": found.velocity.figures(),
    }


def _notes(found: Comparison, judged: bool, embedded: bool, count: int) -> list[str]:
    notes = [
        f"{side.broken} of the {count} pictures of the {name} hold values that are not finite."
        for name, side in (("teacher", found.teacher), ("student", found.student))
        if side.broken
    ]
    if embedded and not judged:
        notes.append(f"The judge looks at {IMAGE_SIZE}x{IMAGE_SIZE} pictures only, so no accuracy was measured.")
    unknown = sum(verdict is None for verdict in found.teacher.verdicts)
    if unknown:
        notes.append(f"{unknown} prompts are no captions of the embedded teacher's scenes, and were not judged.")
    return notes


def _write(run: RunDirectory, result: dict[str, Any], prompts: Sequence[str], found: Comparison) -> None:
    """The folder of pictures, then evaluation.json; both are written beside their place and renamed."""
    folder = run.path / PICTURES_FOLDER
    beside = run.path / f".{PICTURES_FOLDER}.{os.getpid()}"
    try:
        beside.mkdir()
        _write_pictures(beside, prompts, found)
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise cannot_write(folder, error) from error
    write_text_atomically(run.path / EVALUATION_FILE, json.dumps(result, indent=1, allow_nan=False) + "\n")


def _write_pictures(folder: Path, prompts: Sequence[str], found: Comparison) -> None:
    sides = {"teacher": found.teacher, "student": found.student}
    entries = []
    for index, prompt in enumerate(prompts[:_PICTURES]):
        files = {name: f"{name}-{index:03d}.png" for name in sides}
        for name, side in sides.items():
            side.pictures[index].save(folder / files[name])
        verdict = {name: side.verdicts[index] for name, side in sides.items() if side.verdicts}
        entries.append({"prompt": prompt, **files, "verdict": verdict})
    write_text_atomically(folder / PICTURES_FILE, json.dumps({"schema": 1, "pictures": entries}, indent=1))
