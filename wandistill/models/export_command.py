"""`wandistill export`: the student of a run's checkpoint, for diffusers or for ComfyUI."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch

from wandistill.config import parse_resolution
from wandistill.errors import ConfigError
from wandistill.evaluate.rundir import RunDirectory, read_run
from wandistill.models.export import export_comfyui, export_student
from wandistill.models.student import empty_student
from wandistill.models.wan import open_teacher
from wandistill.student_config import student_spec
from wandistill.train import checkpoint

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the run, the checkpoint and the kind of export."""
    parser.add_argument("dir", metavar="RUN_DIR", help="a run's --output_dir")
    parser.add_argument(
        "--checkpoint", default="latest", metavar="latest|step-N|PATH", help="which checkpoint (default: the newest)"
    )
    parser.add_argument(
        "--ema", action="store_const", const=True, help="the averaged weights (default: where there are any)"
    )
    parser.add_argument(
        "--no_ema", "--no-ema", dest="ema", action="store_const", const=False, help="the weights as they were trained"
    )
    parser.add_argument(
        "--format",
        choices=("diffusers", "comfyui"),
        default="diffusers",
        help="a WanPipeline folder, or one safetensors file of the transformer (default: diffusers)",
    )
    parser.add_argument(
        "--output",
        metavar="PATH",
        help="folder or file to write (default: RUN_DIR/student, RUN_DIR/student.safetensors)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the weights; what Wan keeps in float32 stays so (default: float32)",
    )


def run(args: argparse.Namespace) -> int:
    """Exports, and prints the path; returns 0."""
    directory = Path(args.dir)
    run = _read(directory)
    config = run.config
    folder = open_teacher(run.record["teacher"]["path"], config.teacher_revision)
    spec = student_spec(run.record["student"]["config"], folder.architecture)
    source = _find_checkpoint(directory, args.checkpoint)
    average = config.averages if args.ema is None else args.ema
    weights = checkpoint.load_student_weights(source, average=average)
    dtype = getattr(torch, args.dtype)
    if args.format == "comfyui":
        destination = Path(args.output or directory / "student.safetensors")
        export_comfyui(weights, spec.architecture, destination, dtype=dtype)
    else:
        destination = Path(args.output or directory / "student")
        export_student(
            empty_student(folder, spec).transformer,
            folder,
            destination,
            resolution=parse_resolution(config.resolution),
            steps=config.sample_steps,
            shift=config.flow_shift,
            dtype=dtype,
            weights=weights,
            details={"checkpoint": source.name, "average": average, "student": spec.to_config()},
        )
    print(destination)
    return 0


def _read(directory: Path) -> RunDirectory:
    run = read_run(directory)
    if not run.record:
        raise ConfigError(
            f"{directory}: holds no run.json, so it is not the --output_dir of a run; give the directory that "
            "`wandistill train` wrote."
        )
    missing = [name for name in ("config", "teacher", "student") if name not in run.record]
    if missing:
        raise ConfigError(f"{directory / 'run.json'} has no {', '.join(missing)}: it is damaged; restore the file.")
    return run


def _find_checkpoint(directory: Path, wanted: str) -> Path:
    root = directory / "checkpoints"
    if wanted == "latest":
        found, notes = checkpoint.choose(root, "latest")
        for note in notes:
            _log.warning(note)
        assert found is not None
        return found
    path = root / wanted if (root / wanted).is_dir() else Path(wanted)
    if not path.is_dir():
        there = ", ".join(other.name for other in checkpoint.checkpoints(root)) or "none"
        raise ConfigError(f"--checkpoint {wanted}: is not there; {root} has {there}.")
    return path
