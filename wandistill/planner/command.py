"""`wandistill plan`: which placements fit, before anything loads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from wandistill.catalog import Gpu, find_gpu, find_model, find_node
from wandistill.config import FIELDS, TrainConfig, from_mapping, parse_resolution
from wandistill.device_map import read_device_map
from wandistill.errors import ConfigError, ExitCode, WandistillError
from wandistill.planner import report
from wandistill.planner.advice import advise, improve
from wandistill.planner.placements import AUTO, Placement
from wandistill.planner.plan import plan
from wandistill.planner.request import MARGIN, OPTIMIZERS, TEACHER_DTYPES, Machines, PlanRequest
from wandistill.planner.search import MAXIMA, MINIMA, largest, smallest
from wandistill.planner.timing import prepare_cost
from wandistill.student_config import student_spec
from wandistill.units import parse_bytes

_DEFAULTS = TrainConfig()
# Cores and disk of a node that nobody described.
_CORES = 16
_DISK_RATE = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The machines, and those settings of `wandistill train` that take memory or time."""

    def flag(name: str, **options: object) -> None:
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, **options)  # type: ignore[arg-type]

    flag("model", required=True, help="teacher: a catalogue name such as wan2.2-t2v-a14b, a hub id, or a local folder")
    flag("student", default=_DEFAULTS.student_config, help="half, quarter, 1b, or a file (default: %(default)s)")
    flag("node", help="a node shape of the catalogue: gives --gpu, --gpus, --host_memory, --cores and --disk_rate")
    flag("gpu", help="a GPU of the catalogue, such as rtx-3090; none or left out: no GPU")
    flag("gpus", type=int, help="GPUs of a node; without a GPU: processes (default: 1)")
    flag("nodes", type=int, default=1, help="nodes, all alike (default: %(default)s)")
    flag("host_memory", help="memory of a node, such as 256GiB")
    flag("gpu_memory", help="memory of each GPU, in place of the catalogue's")
    flag("cores", type=int, help=f"CPU cores of a node (default: {_CORES})")
    flag("disk_rate", type=float, help=f"GB/s that a node reads from disk (default: {_DISK_RATE:g})")
    flag("disk", help="free disk space for checkpoints (default: not limited)")
    flag("resolution", default="", help="WIDTHxHEIGHT (default: 832x480; 64x64 for the embedded teacher)")
    flag("batch_size", type=int, default=1, help="samples of a rank's micro-batch (default: %(default)s)")
    flag(
        "gradient_accumulation_steps",
        type=int,
        default=_DEFAULTS.gradient_accumulation_steps,
        help="micro-batches a step",
    )
    flag("teacher_dtype", choices=TEACHER_DTYPES, default="", help="default: bfloat16; float32 without a GPU")
    flag("teacher_micro_batch", type=int, default=0, help=_help("teacher_micro_batch"))
    flag("teacher_compile", action="store_true", help=_help("teacher_compile"))
    flag("guidance_scale", type=float, default=_DEFAULTS.guidance_scale, help=_help("guidance_scale"))
    flag("optimizer", choices=OPTIMIZERS, default=_DEFAULTS.optimizer, help=_help("optimizer"))
    flag(
        "mixed_precision",
        choices=("no", "fp16", "bf16"),
        default=_DEFAULTS.mixed_precision,
        help=_help("mixed_precision"),
    )
    flag(
        "student_parallel", choices=("ddp", "fsdp"), default=_DEFAULTS.student_parallel, help=_help("student_parallel")
    )
    flag(
        "ema_device",
        choices=("gpu", "cpu", "none"),
        default="none",
        help="where an average is kept (default: no average)",
    )
    flag("gradient_checkpointing", action="store_true", help=_help("gradient_checkpointing"))
    flag("feature_weight", type=float, default=_DEFAULTS.feature_weight, help=_help("feature_weight"))
    flag("embeddings", choices=("cached", "online"), default=_DEFAULTS.embeddings, help=_help("embeddings"))
    flag("no_save_samples", action="store_true", help="draw no samples during training")
    flag("resident_blocks", default=_DEFAULTS.resident_blocks, help=_help("resident_blocks"), metavar="auto|N")
    flag("stream_fetch", choices=("auto", "own", "split"), default="auto", help=_help("stream_fetch"))
    flag("disk_buffer", default="", help=_help("disk_buffer"))
    flag("max_memory", default="", help=_help("max_memory"))
    flag("teacher_rank", type=int, default=0, help=_help("teacher_rank"))
    flag("teacher_rank_trains", choices=("auto", "yes", "no"), default="auto", help=_help("teacher_rank_trains"))
    flag("teacher_device_map", default="", metavar="FILE", help=_help("teacher_device_map"))
    placements = [AUTO, *(placement.value for placement in Placement)]
    flag(
        "teacher_device_strategy",
        choices=placements,
        default=AUTO,
        help="a placement to judge alone (default: %(default)s)",
    )
    flag("memory_margin", type=float, default=MARGIN, help="share of memory to leave free (default: %(default)s)")
    flag("prompts", type=int, default=1000, help="prompts for the cost of the caches (default: %(default)s)")
    flag("max", choices=MAXIMA, help="ask for the largest that fits")
    flag("min", choices=MINIMA, help="ask for the least that is enough")
    flag("json", action="store_true", help="print JSON")
    flag("explain", action="store_true", help="print every term's formula with the numbers in")
    flag("check", action="store_true", help="end with 2 if nothing fits")


def run(args: argparse.Namespace) -> int:
    """Answers; 0, or with `--check` 2 if nothing fits.

    Raises:
        ConfigError: an unknown name, or numbers that cannot be.
    """
    request = request_of(args)
    if args.max or args.min:
        found = largest(request, args.max) if args.max else smallest(request, args.min)
        print(report.dump({"schema": 1, **found.to_json()}) if args.json else report.found_text(found))
        return _code(args, found.value is not None)
    answer = plan(request)
    chosen = answer.choice
    advice = advise(answer) if chosen is None else []
    better = improve(answer) if chosen is not None else None
    prepare = None
    if chosen is not None:
        prepare = prepare_cost(
            chosen.settled(request),
            chosen.placement,
            chosen.places,
            prompts=args.prompts,
            rollout_steps=_DEFAULTS.rollout_steps,
        )
    if args.json:
        print(report.dump(report.to_json(answer, advice, better, prepare)))
    else:
        print(report.text(answer, advice, better, prepare, explain=args.explain))
    return _code(args, chosen is not None)


def request_of(args: argparse.Namespace) -> PlanRequest:
    """The question that the flags ask.

    Raises:
        ConfigError: an unknown name, or numbers that cannot be.
    """
    model = find_model(args.model)
    spec = student_spec(args.student, model.architecture)
    machines = _machines(args)
    default = spec.default_resolution(embedded=model.name == "embedded")
    width, height = parse_resolution(args.resolution or default)
    layers = model.architecture.num_layers
    path = args.teacher_device_map
    return PlanRequest(
        model=model,
        student=spec.architecture,
        student_name=spec.name,
        machines=machines,
        width=width,
        height=height,
        batch_size=args.batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        teacher_dtype=args.teacher_dtype or ("bfloat16" if machines.gpu else "float32"),
        teacher_micro_batch=args.teacher_micro_batch,
        teacher_compile=args.teacher_compile,
        guided=args.guidance_scale != 1,
        optimizer=args.optimizer,
        mixed_precision=args.mixed_precision,
        student_parallel=args.student_parallel,
        ema_device=args.ema_device,
        gradient_checkpointing=args.gradient_checkpointing,
        features=args.feature_weight > 0,
        embeddings=args.embeddings,
        save_samples=not args.no_save_samples,
        resident_blocks=from_mapping({"resident_blocks": args.resident_blocks}).kept_blocks,
        stream_fetch=args.stream_fetch,
        disk_buffer=parse_bytes(args.disk_buffer) if args.disk_buffer else None,
        max_memory=parse_bytes(args.max_memory) if args.max_memory else None,
        teacher_rank=args.teacher_rank,
        teacher_rank_trains=args.teacher_rank_trains,
        device_map=read_device_map(Path(path), layers, machines.world) if path else None,
        placement=args.teacher_device_strategy,
        memory_margin=args.memory_margin,
    )


def _machines(args: argparse.Namespace) -> Machines:
    shape = find_node(args.node) if args.node else None
    gpu: Gpu | None = None
    name = args.gpu or (shape.gpu if shape else "none")
    if name.lower() != "none":
        gpu = find_gpu(name)
    memory = args.host_memory or (shape.host_memory if shape else None)
    if memory is None:
        raise ConfigError(
            "--host_memory is missing: give the memory of a node, such as 256GiB, or a --node of the catalogue."
        )
    ranks = args.gpus if args.gpus is not None else (shape.gpus if shape and gpu else 1)
    ranks = ranks or 1  # no GPU: one process
    for flag, value in (("gpus", ranks), ("nodes", args.nodes), ("cores", args.cores or 1)):
        if value < 1:
            raise ConfigError(f"--{flag} {value}: must be at least 1.")
    if gpu is not None and args.gpus == 0:
        raise ConfigError(f"--gpus 0 and --gpu {name} contradict each other: leave one of them out.")
    return Machines(
        gpu=gpu,
        ranks=ranks,
        nodes=args.nodes,
        host_memory=parse_bytes(memory),
        cores=args.cores or (shape.cores if shape else _CORES),
        disk=parse_bytes(args.disk) if args.disk else None,
        disk_rate=args.disk_rate or (shape.disk if shape else _DISK_RATE),
        gpu_memory=parse_bytes(args.gpu_memory) if args.gpu_memory else None,
    )


def _help(name: str) -> str:
    return str(FIELDS[name].metadata["help"]).replace("%", "%%")


def _code(args: argparse.Namespace, fits: bool) -> int:
    return int(ExitCode.BAD_CONFIG if args.check and not fits else ExitCode.DONE)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command alone, as `wandistill plan` runs it."""
    parser = argparse.ArgumentParser(prog="wandistill plan")
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except WandistillError as error:
        print(f"wandistill plan: {error}", file=sys.stderr)
        return int(error.exit_code)
