"""The configuration of a run, once: flags, the YAML file of `--config`, `--help` and the JSON schema come from here.

Every field is a flag, `--field_name` or `--field-name`, and a key of the YAML file. Flags win over the file, the file
over the defaults. No torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandistill.errors import ConfigError
from wandistill.student_config import StudentSpec

PLACEMENTS = (
    "cpu",
    "gpu",
    "gpu0",
    "balanced",
    "sequential",
    "custom",
    "offload",
    "disk",
    "sharded",
    "stream",
    "auto",
)

# The seed project's flags for a placement, and what they stand for.
PLACEMENT_ALIASES = {
    "teacher_on_cpu": "cpu",
    "balanced_teacher": "balanced",
    "balance_teacher": "balanced",
    "sequential_teacher": "sequential",
}


def _option(
    default: Any,
    help: str,
    group: str,
    *,
    choices: Sequence[str] | None = None,
    identity: bool = True,
    metavar: str = "",
    schema: Mapping[str, Any] | None = None,
) -> Any:
    """A field; `identity` says whether a resumed run must have the same value, `schema` what a file may hold beyond
    what its type says."""
    metadata = {"help": help, "group": group, "choices": choices, "identity": identity, "metavar": metavar}
    return field(default=default, metadata={**metadata, "schema": schema or {}})


@dataclass(frozen=True)
class TrainConfig:
    """Everything that `wandistill train` and `wandistill prepare` can be told."""

    # --- what is distilled ---
    teacher_path: str = _option(
        "embedded",
        "teacher: a local diffusers folder, a hub id such as Wan-AI/Wan2.2-T2V-A14B-Diffusers, or 'embedded'",
        "models",
    )
    teacher_revision: str = _option(
        "", "branch, tag or commit of a teacher on the hub; empty: its main branch", "models"
    )
    student_config: str = _option(
        "half",
        "student: half, quarter, 1b, or a JSON or YAML file of its layers, heads, ffn and blocks",
        "models",
        identity=False,
    )
    init: str = _option(
        "low",
        "where the student's blocks come from; auto measures each and takes the best",
        "models",
        choices=("low", "average", "high", "auto", "random"),
    )

    # --- data ---
    data_path: str = _option(
        "", "prompts (.txt, .csv, .jsonl, .parquet) or a folder of captioned images", "data", metavar="PATH"
    )
    data_column: str = _option("", "column that holds the prompts; empty: prompt, caption or text", "data")
    cache_dir: str = _option(
        "", "where embeddings and latents are cached; empty: OUTPUT_DIR/cache", "data", identity=False, metavar="DIR"
    )
    embeddings: str = _option(
        "cached",
        "encode all prompts once into a cache on disk, or each when it is needed",
        "data",
        choices=("cached", "online"),
    )
    targets: str = _option(
        "online",
        "ask the teacher in every step, or train from the states and velocities of its rollouts, without it",
        "data",
        choices=("online", "cached"),
    )
    resolution: str = _option("", "pictures' WIDTHxHEIGHT; empty: 64x64 for the embedded teacher, 832x480 else", "data")
    negative_prompt: str = _option("", "prompt of the unconditional half of guidance", "data")
    rollout_steps: int = _option(8, "steps of the teacher's rollouts that give the latents", "data")
    rollouts_per_prompt: int = _option(1, "rollouts of each prompt", "data")

    # --- training ---
    output_dir: str = _option("outputs/run", "where everything is written", "training", identity=False, metavar="DIR")
    num_epochs: int = _option(1, "passes over the data; --max_steps wins", "training")
    max_steps: int = _option(0, "optimizer steps; 0: as many as --num_epochs takes", "training")
    batch_size: int = _option(4, "samples of one micro-batch of one rank", "training", identity=False)
    gradient_accumulation_steps: int = _option(1, "micro-batches of an optimizer step", "training", identity=False)
    lr: float = _option(1e-4, "peak learning rate", "training")
    warmup_steps: int = _option(100, "optimizer steps of linear warm-up; cosine decay to zero after", "training")
    weight_decay: float = _option(0.0, "AdamW's decoupled weight decay", "training")
    max_grad_norm: float = _option(1.0, "gradient norm above which gradients are scaled down", "training")
    objective: str = _option(
        "velocity",
        "loss: mean square error of the velocity, or that divided by the target's mean square per sample",
        "training",
        choices=("velocity", "velocity_normalized"),
    )
    feature_weight: float = _option(0.0, "weight of the block-feature loss; 0: none", "training")
    guidance_scale: float = _option(4.0, "guidance folded into the target, high-noise expert", "training")
    guidance_scale_2: float = _option(0.0, "guidance of the low-noise expert; 0: that of --guidance_scale", "training")
    flow_shift: float = _option(0.0, "shift of the noise schedule; 0: the teacher's own", "training")
    optimizer: str = _option(
        "adamw",
        "adamw: float32; adamw_bf16: weights, gradients and moments in bfloat16, stochastic rounding; "
        "adamw8bit: the same with 8-bit moments",
        "training",
        choices=("adamw", "adamw_bf16", "adamw8bit"),
    )
    mixed_precision: str = _option(
        "no", "precision of the student's compute", "training", choices=("no", "fp16", "bf16")
    )
    ema_decay: float = _option(0.0, "decay of the student's averaged weights; 0: none", "training")
    ema_device: str = _option("gpu", "where the average is kept", "training", choices=("gpu", "cpu", "none"))
    gradient_checkpointing: bool = _option(
        False, "recompute the student's blocks in backward to save memory", "training", identity=False
    )
    student_parallel: str = _option(
        "ddp", "student on every rank (ddp) or sharded (fsdp)", "training", choices=("ddp", "fsdp"), identity=False
    )
    seed: int = _option(0, "seed of noise, times, prompts' order and rollouts", "training")
    deterministic: bool = _option(
        False, "deterministic GPU kernels: a resumed run repeats bit for bit, slower", "training", identity=False
    )
    device: str = _option("auto", "device of the student", "training", choices=("auto", "cuda", "cpu"), identity=False)
    distributed: bool = _option(False, "train on all ranks of torchrun (implied by it)", "training", identity=False)

    # --- the teacher's place ---
    teacher_device_strategy: str = _option(
        "auto", "where the teacher's weights live", "teacher", choices=PLACEMENTS, identity=False
    )
    teacher_dtype: str = _option(
        "auto",
        "the teacher's dtype, Wan's float32 parts apart (int8 and float8 are stored so and computed in bfloat16); "
        "auto: bfloat16 on a GPU, float32 on a CPU",
        "teacher",
        choices=("auto", "float32", "float16", "bfloat16", "int8", "float8"),
    )
    memory_margin: float = _option(
        0.05, "share of GPU and host memory that auto leaves free", "teacher", identity=False
    )
    force: bool = _option(
        False,
        "start although the plan says that it does not fit, or 8-bit storage moves the teacher's targets by more than "
        "5 %",
        "teacher",
        identity=False,
    )
    teacher_rank: int = _option(0, "rank that computes the teacher for all under gpu0", "teacher", identity=False)
    teacher_device_map: str = _option(
        "", "which rank, cpu or disk holds which block, for custom", "teacher", identity=False, metavar="FILE"
    )
    share_teacher: bool = _option(
        False, "one host copy of the teacher for all ranks of a node", "teacher", identity=False
    )
    teacher_rank_trains: str = _option(
        "auto",
        "whether gpu0's teacher rank trains a student too; no: it only answers the others, which train as a group; "
        "auto: no where it has no room for both",
        "teacher",
        choices=("auto", "yes", "no"),
        identity=False,
    )
    max_memory: str = _option(
        "", "most teacher bytes on each GPU, such as 20GiB, for balanced and sequential", "teacher", identity=False
    )
    resident_blocks: str = _option(
        "auto",
        "blocks of each expert that stream keeps on the GPU; auto: where the link is the bound, as many as the GPU has "
        "room for",
        "teacher",
        identity=False,
        metavar="auto|N",
        schema={"type": ["integer", "string"], "pattern": "^(auto|[0-9]+)$", "minimum": 0},
    )
    stream_fetch: str = _option(
        "auto",
        "how stream brings blocks to the ranks of a node: own: each copies whole blocks from host memory; split: each "
        "copies a part and gets the rest from the others, in step with them; auto: split where the links from the host "
        "are the bound and GPUs reach each other",
        "teacher",
        choices=("auto", "own", "split"),
        identity=False,
    )
    disk_buffer: str = _option("", "host memory for disk's read-ahead; empty: four blocks", "teacher", identity=False)
    share_dir: str = _option(
        "", "folder of the shared host copy where /dev/shm is too small", "teacher", identity=False, metavar="DIR"
    )
    teacher_micro_batch: int = _option(
        0, "samples in one forward of the teacher; 0: a whole micro-batch", "teacher", identity=False
    )

    teacher_compile: bool = _option(
        False,
        "compile the teacher's blocks (torch.compile): the first step takes longer, the others less",
        "teacher",
    )

    # --- output ---
    resume: str = _option(
        "auto",
        "auto: start, continue, or do nothing where the run is finished; latest or a checkpoint's path: must exist; "
        "never: start anew in an empty directory",
        "output",
        identity=False,
        metavar="auto|latest|never|PATH",
    )
    checkpoint_interval: int = _option(500, "optimizer steps between checkpoints", "output", identity=False)
    keep_checkpoints: int = _option(2, "checkpoints kept", "output", identity=False)
    save_samples: bool = _option(True, "draw pictures during training", "output", identity=False)
    sample_prompts: str = _option(
        "", "file of prompts to draw; empty: the first 8 of the data", "output", identity=False, metavar="FILE"
    )
    sample_interval: int = _option(
        0, "optimizer steps between samples; 0: a quarter of the run", "output", identity=False
    )
    sample_steps: int = _option(8, "steps of a sample, and the student's default number", "output", identity=False)
    sample_dir: str = _option(
        "", "where samples go; empty: OUTPUT_DIR/samples", "output", identity=False, metavar="DIR"
    )
    memory_profile: bool = _option(
        False,
        "write memory_profile.json (planned and measured bytes by phase and term) and, on a GPU, torch's snapshots",
        "output",
        identity=False,
    )
    on_oom: str = _option(
        "stop",
        "what wandistill launch does when memory runs out: end with a report, or start again from the last checkpoint "
        "with the next placement that fits",
        "output",
        choices=("stop", "replan"),
        identity=False,
    )
    max_replans: int = _option(3, "placements that --on_oom replan tries after the first", "output", identity=False)
    host_memory_stop: float = _option(
        0.98,
        "share of the container's memory limit at which wandistill launch ends the ranks before the kernel does",
        "output",
        identity=False,
    )
    report_to: str = _option(
        "none", "tracker beside metrics.jsonl", "output", choices=("none", "tensorboard", "wandb"), identity=False
    )
    metrics_port: int = _option(
        0, "port of this node's Prometheus metrics; 0: none are served", "output", identity=False
    )

    @property
    def averages(self) -> bool:
        """Whether an average of the student's weights is kept, to be exported in their place."""
        return self.ema_decay > 0 and self.ema_device != "none"

    @property
    def cache_path(self) -> Path:
        """The folder of the caches."""
        return Path(self.cache_dir) if self.cache_dir else Path(self.output_dir) / "cache"

    @property
    def sample_path(self) -> Path:
        """The folder of the samples."""
        return Path(self.sample_dir) if self.sample_dir else Path(self.output_dir) / "samples"

    @property
    def guidance_low(self) -> float:
        """Guidance of the low-noise expert."""
        return self.guidance_scale_2 or self.guidance_scale

    @property
    def kept_blocks(self) -> int | None:
        """`resident_blocks` as a number; None: the plan says how many."""
        return None if self.resident_blocks == "auto" else int(self.resident_blocks)

    def dtype_on(self, device: str) -> str:
        """The teacher's dtype on a device of type `device`, cuda or cpu."""
        if self.teacher_dtype != "auto":
            return self.teacher_dtype
        return "bfloat16" if device == "cuda" else "float32"

    def identity(self) -> dict[str, Any]:
        """The values that a resumed run must share with the one it continues."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["identity"]}


FIELDS = {f.name: f for f in dataclasses.fields(TrainConfig)}
_TYPES = typing.get_type_hints(TrainConfig)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every field as a flag with underscores or hyphens, `--config`, and the old placement flags."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    parser.add_argument("--config", metavar="FILE", default=None, help="YAML file of these settings; flags win over it")
    for name, spec in FIELDS.items():
        meta = spec.metadata
        group = groups.setdefault(meta["group"], parser.add_argument_group(meta["group"]))
        flags = _spellings(name)
        shown = spec.default if spec.default != "" else None
        text = meta["help"] + (
            ""
            if shown is None
            else f" (default: {str(shown).lower() if shown in (True, False) and isinstance(shown, bool) else shown})"
        )
        text = text.replace("%", "%%")
        if _TYPES[name] is bool:
            group.add_argument(*flags, dest=name, action="store_const", const=True, default=None, help=text)
            negative = [f"--no_{name}", f"--no-{name.replace('_', '-')}"]
            group.add_argument(*negative, dest=name, action="store_const", const=False, help=argparse.SUPPRESS)
        else:
            metavar = meta["metavar"] or (None if meta["choices"] else name.upper().rsplit("_", 1)[-1])
            if meta["choices"]:
                metavar = "{" + ",".join(meta["choices"]) + "}"
            group.add_argument(*flags, dest=name, default=None, metavar=metavar, help=text)
    group = groups["teacher"]
    for alias, strategy in PLACEMENT_ALIASES.items():
        group.add_argument(
            *_spellings(alias),
            dest="placement_alias",
            action="append_const",
            const=(alias, strategy),
            help=f"the same as --teacher_device_strategy {strategy}",
        )


def from_arguments(args: argparse.Namespace) -> TrainConfig:
    """The configuration of parsed flags and the file they name.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or two settings that contradict each other.
    """
    values: dict[str, Any] = read_file(Path(args.config)) if args.config else {}
    given = {name: getattr(args, name) for name in FIELDS if getattr(args, name, None) is not None}
    for alias, strategy in getattr(args, "placement_alias", None) or ():
        chosen = given.get("teacher_device_strategy", strategy)
        if chosen != strategy:
            raise ConfigError(
                f"--{alias} means --teacher_device_strategy {strategy}, but {chosen} was asked for too: "
                "give one of the two."
            )
        given["teacher_device_strategy"] = strategy
    return from_mapping({**values, **given})


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--config {path}: cannot be read ({error.strerror}); give the path of a YAML file."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: holds a {type(content).__name__}, but must map settings to values.")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def from_mapping(values: Mapping[str, Any]) -> TrainConfig:
    """A checked configuration; values may be texts, as flags give them."""
    resolved: dict[str, Any] = {}
    for name, value in values.items():
        if name in PLACEMENT_ALIASES:
            if value in (True, "true"):
                resolved.setdefault("teacher_device_strategy", PLACEMENT_ALIASES[name])
            continue
        if name not in FIELDS:
            close = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else f"; known are: {', '.join(sorted(FIELDS))}."
            raise ConfigError(f"'{name}' is not a setting{hint}")
        resolved[name] = _convert(name, value)
    config = TrainConfig(**resolved)
    _check_ranges(config)
    return config


def with_defaults(config: TrainConfig, student: StudentSpec, *, device: str, flow_shift: float) -> TrainConfig:
    """`config` with every default settled that depends on student, teacher or device.

    Args:
        device: type of the device that the student trains on, cuda or cpu.
        flow_shift: the teacher's own.

    Raises:
        ConfigError: a combination of settings that cannot be.
    """
    embedded = config.teacher_path == "embedded"
    config = dataclasses.replace(
        config,
        device=device,
        teacher_dtype=config.dtype_on(device),
        resolution=config.resolution or student.default_resolution(embedded=embedded),
        flow_shift=config.flow_shift or flow_shift,
        guidance_scale_2=config.guidance_low,
        init=student.init or config.init,
    )
    if not config.data_path and not embedded:
        raise ConfigError(
            "--data_path is missing: give a file of prompts (.txt, .csv, .jsonl, .parquet) or a folder of captioned "
            "images. Only the embedded teacher brings prompts of its own."
        )
    if config.mixed_precision == "fp16" and device != "cuda":
        raise ConfigError("--mixed_precision fp16: needs a GPU; on a CPU use no, or bf16 where the CPU has it.")
    if config.targets == "cached" and config.feature_weight > 0:
        raise ConfigError(
            "--targets cached and --feature_weight contradict each other: cached targets hold velocities, no block "
            "features. Use --targets online, or --feature_weight 0."
        )
    return config


def json_schema() -> dict[str, Any]:
    """The JSON schema of the file that `--config` reads."""
    kinds = {int: "integer", float: "number", bool: "boolean", str: "string"}
    properties = {}
    for name, spec in FIELDS.items():
        entry: dict[str, Any] = {"type": kinds[_TYPES[name]], "description": spec.metadata["help"]}
        if spec.metadata["choices"]:
            entry["enum"] = list(spec.metadata["choices"])
        properties[name] = entry | spec.metadata["schema"] | {"default": spec.default}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def parse_resolution(text: str) -> tuple[int, int]:
    """Width and height in pixels of a text such as `832x480`."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--resolution {text}: write WIDTHxHEIGHT in pixels, such as 832x480.")
    return int(parts[0]), int(parts[1])


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def _convert(name: str, value: Any) -> Any:
    kind, spec = _TYPES[name], FIELDS[name]
    converted = _parse(kind, value)
    if converted is None:
        article = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
        raise ConfigError(f"--{name} {value}: must be {article}.")
    choices = spec.metadata["choices"]
    if choices and converted not in choices:
        raise ConfigError(f"--{name} {value}: is not one of {', '.join(choices)}.")
    return converted


def _parse(kind: type | types.GenericAlias, value: Any) -> Any:
    """`value` as `kind`, or None if it is not one."""
    if kind is bool:
        return (
            {True: True, False: False, "true": True, "false": False}.get(value)
            if isinstance(value, bool | str)
            else None
        )
    if kind is str:
        return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
        if kind is int:
            return int(value) if isinstance(value, str) else (int(number) if number == int(number) else None)
        return number if number == number and abs(number) != float("inf") else None
    except (TypeError, ValueError, OverflowError):
        return None


_AT_LEAST_ONE = (
    "batch_size",
    "gradient_accumulation_steps",
    "num_epochs",
    "rollout_steps",
    "rollouts_per_prompt",
    "sample_steps",
    "keep_checkpoints",
    "checkpoint_interval",
)
_NOT_NEGATIVE = (
    "max_steps",
    "warmup_steps",
    "weight_decay",
    "feature_weight",
    "guidance_scale_2",
    "flow_shift",
    "sample_interval",
    "teacher_micro_batch",
    "max_replans",
    "seed",
)


def _check_ranges(config: TrainConfig) -> None:
    for name in _AT_LEAST_ONE:
        if getattr(config, name) < 1:
            raise ConfigError(f"--{name} {getattr(config, name)}: must be at least 1.")
    for name in _NOT_NEGATIVE:
        if getattr(config, name) < 0:
            raise ConfigError(f"--{name} {getattr(config, name)}: must not be negative.")
    if config.resident_blocks != "auto" and not config.resident_blocks.isdecimal():
        raise ConfigError(f"--resident_blocks {config.resident_blocks}: must be a whole number, or auto.")
    for name in ("lr", "max_grad_norm", "guidance_scale"):
        if getattr(config, name) <= 0:
            raise ConfigError(f"--{name} {getattr(config, name)}: must be above 0.")
    if not 0 <= config.memory_margin < 1:
        raise ConfigError(f"--memory_margin {config.memory_margin}: must be at least 0 and below 1, such as 0.05.")
    if not 0 < config.host_memory_stop <= 1:
        raise ConfigError(
            f"--host_memory_stop {config.host_memory_stop}: must be above 0 and at most 1, such as 0.98; 1 leaves it "
            "to the kernel."
        )
    if not 0 <= config.ema_decay < 1:
        raise ConfigError(f"--ema_decay {config.ema_decay}: must be at least 0 and below 1, such as 0.999.")
    if not 0 <= config.metrics_port < 1 << 16:
        raise ConfigError(f"--metrics_port {config.metrics_port}: must be a port, 1 to 65535, or 0 for none.")
    if config.resolution:
        parse_resolution(config.resolution)
