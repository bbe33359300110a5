"""`python -m tests.gpu.measure_plan`: the planner's predictions against what real GPUs then measure.

Each configuration is a short run of `wandistill train` on a teacher of random weights in the shape of a published one.
The prediction is made by a process of its own, which measures the machine and plans as every run does, and is written
to the table before the run starts; what run.json then says was measured is put beside it. A third of the
configurations is drawn at random, so that no number can be fitted to them. `tests/unit/test_measured_plans.py` replays
the planner against the table.

On a machine without a GPU, `--tiny` goes through the same steps with tiny teachers on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [f"a large red circle left of {number} small blue squares" for number in range(32)]
SHAPES = ("wan2.1-t2v-1.3b", "wan2.1-t2v-14b")
# Settings that are measured whatever is drawn: teacher's shape, ranks, flags of wandistill train.
FIXED: list[tuple[str, int, dict[str, Any]]] = [
    ("wan2.1-t2v-14b", 1, {"teacher_device_strategy": "gpu", "student_config": "1b"}),
    ("wan2.1-t2v-14b", 1, {"teacher_device_strategy": "stream", "student_config": "1b", "batch_size": 4}),
    ("wan2.1-t2v-14b", 1, {"teacher_device_strategy": "offload", "student_config": "1b"}),
    ("wan2.1-t2v-14b", 1, {"teacher_device_strategy": "disk", "student_config": "1b"}),
    ("wan2.1-t2v-1.3b", 1, {"teacher_device_strategy": "gpu", "student_config": "half", "resolution": "1024x1024"}),
    ("wan2.1-t2v-1.3b", 1, {"teacher_device_strategy": "cpu", "student_config": "quarter", "resolution": "256x256"}),
    ("wan2.1-t2v-14b", 2, {"teacher_device_strategy": "sharded", "student_config": "1b"}),
    ("wan2.1-t2v-14b", 2, {"teacher_device_strategy": "balanced", "student_config": "1b"}),
    ("wan2.1-t2v-14b", 2, {"teacher_device_strategy": "gpu0", "student_config": "1b"}),
    ("wan2.1-t2v-1.3b", 2, {"teacher_device_strategy": "gpu", "student_config": "half", "student_parallel": "fsdp"}),
]
# What the others are drawn from.
DRAWN: dict[str, list[Any]] = {
    "batch_size": [1, 2, 4],
    "resolution": ["256x256", "480x480", "832x480", "1024x1024"],
    "gradient_accumulation_steps": [1, 2],
    "gradient_checkpointing": [True, False],
    "mixed_precision": ["no", "bf16"],
    "optimizer": ["adamw", "adamw_bf16"],
    "teacher_dtype": ["bfloat16", "float32", "int8"],
}
ALONE, TOGETHER = ("gpu", "stream", "offload", "disk"), ("gpu0", "balanced", "sequential", "sharded")
COMMON = {"max_steps": 8, "rollout_steps": 1, "warmup_steps": 1, "checkpoint_interval": 8, "guidance_scale": 4.0}
TINY = {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 128, "text_dim": 32}


def main() -> None:
    """Measures and leaves the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=len(FIXED) * 3 // 2, help="how many; a third is drawn at random")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs, or with --tiny processes, to use at most")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("measured.yaml"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "measure-plan", help="a fast disk")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny teachers on the CPU: checks this script, not the plan"
    )
    parser.add_argument("--predict", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.predict:
        predict(json.loads(args.predict.read_text()), args.predict.with_suffix(".plan.json"))
        return
    rows: list[dict[str, Any]] = yaml.safe_load(args.out.read_text()) or [] if args.out.exists() else []
    wanted = chosen(args.configs, args.gpus)
    while wanted:
        shape, ranks, settings, drawn = wanted.pop(0)
        print(f"{shape}, {ranks} ranks, {settings}", flush=True)
        config = prepared(args.work, shape, settings, tiny=args.tiny)
        row = {"shape": shape, "ranks": ranks, "drawn": drawn, "settings": settings, "planner": planner_version()}
        row["predicted"] = started(ranks, config, args.work, measure=False)
        if "refused" in row["predicted"]:
            print(row["predicted"]["refused"], flush=True)
            if drawn:
                wanted.append((*draw(random.SystemRandom(), args.gpus), True))
            continue
        row["measured"] = None
        rows.append(row)
        save(args.out, rows)  # before the run starts
        row["measured"] = started(ranks, config, args.work, measure=True)
        save(args.out, rows)


def chosen(count: int, gpus: int) -> list[tuple[str, int, dict[str, Any], bool]]:
    """Shape, ranks, settings, and whether they were drawn."""
    drawn = math.ceil(count / 3)
    fixed = [entry for entry in FIXED if entry[1] <= gpus][: count - drawn]
    return [(*entry, False) for entry in fixed] + [(*draw(random.SystemRandom(), gpus), True) for _ in range(drawn)]


def draw(source: random.Random, gpus: int) -> tuple[str, int, dict[str, Any]]:
    """A configuration at random."""
    ranks = source.choice([count for count in (1, 2, 4, 8) if count <= gpus])
    settings = {name: source.choice(values) for name, values in DRAWN.items()}
    settings["teacher_device_strategy"] = source.choice(ALONE if ranks == 1 else ALONE + TOGETHER)
    settings["student_config"] = source.choice(("1b", "half", "quarter"))
    if settings["optimizer"] != "adamw":
        settings["mixed_precision"] = "no"
    return source.choice(SHAPES), ranks, settings


def prepared(work: Path, shape: str, settings: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """The whole configuration; makes prompts and teacher where they are missing."""
    work.mkdir(parents=True, exist_ok=True)
    prompts = work / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    teacher = work / (f"tiny-{shape}" if tiny else shape)
    if not (teacher / "model_index.json").exists():
        random_teacher(teacher, shape, tiny=tiny)
    given = {"teacher_dtype": "bfloat16", "gradient_checkpointing": True, "mixed_precision": "bf16", **settings}
    if tiny:
        # A CPU has no fast half precision, and the tiny teacher no room for a billion parameters.
        given |= {"device": "cpu", "mixed_precision": "no", "teacher_dtype": "float32", "optimizer": "adamw"}
        given |= {"student_config": "half", "resolution": "64x64"}
    return {**COMMON, **given, "teacher_path": str(teacher), "data_path": str(prompts), "save_samples": False}


def random_teacher(folder: Path, shape: str, *, tiny: bool) -> None:
    """A teacher folder in the shape of a published model, with random weights in bfloat16 and small other parts."""
    import torch
    from diffusers import WanTransformer3DModel
    from safetensors.torch import save_file

    from tests.tiny_wan import LAYOUTS, build_tiny_wan
    from wandistill.catalog import find_model
    from wandistill.models.weights import empty_transformer

    build_tiny_wan(LAYOUTS["t2v-1.3b"], folder)
    tiny_config = json.loads((folder / "transformer" / "config.json").read_text())
    own = {**find_model(shape).architecture.to_config(), "text_dim": tiny_config["text_dim"], "rope_max_seq_len": 1024}
    config = {**tiny_config, **own, **({**TINY, "text_dim": tiny_config["text_dim"]} if tiny else {})}
    for file in (folder / "transformer").iterdir():
        file.unlink()
    keep = set(WanTransformer3DModel._keep_in_fp32_modules)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, parameter in empty_transformer(config).named_parameters():
        values = torch.empty(parameter.shape, dtype=torch.float32).normal_(0, 0.02, generator=generator)
        weights[name] = values if keep.intersection(name.split(".")) else values.to(torch.bfloat16)
    save_file(weights, folder / "transformer" / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    (folder / "transformer" / "config.json").write_text(json.dumps(config))


def started(ranks: int, config: dict[str, Any], work: Path, *, measure: bool) -> dict[str, Any]:
    """What a new world of ranks finds: the plan, or with `measure` the run's own figures."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps({**config, "output_dir": f"{folder}/out"}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"]
        command += ["wandistill.train", "--config"] if measure else ["tests.gpu.measure_plan", "--predict"]
        threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
        subprocess.run([*command, str(file)], check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": threads})
        if measure:
            return dict(json.loads((Path(folder) / "out" / "run.json").read_text())["memory"])
        return dict(json.loads(file.with_suffix(".plan.json").read_text()))


def predict(values: dict[str, Any], out: Path) -> None:
    """Measures the machine and plans as a run does; writes what is needed to plan again elsewhere, or the refusal."""
    import dataclasses

    from wandistill.config import from_mapping
    from wandistill.errors import DoesNotFit
    from wandistill.planner.outcome import RankUse, side_by_side
    from wandistill.train import distributed
    from wandistill.train.placing import settle
    from wandistill.train.setup import resolve, set_precision

    config = from_mapping(values)
    world = distributed.start(config)
    try:
        setup = resolve(config, world)
        set_precision(setup)
        try:
            settled = settle(setup.config, setup.folder, setup.spec, world)
        except DoesNotFit as error:
            if world.is_main:
                out.write_text(json.dumps({"refused": str(error)}))
            return
        if world.is_main:
            nothing = [RankUse(rank, probe.node, 1, 1, 0, 0) for rank, probe in enumerate(settled.probes)]
            figures = side_by_side(settled.decision, nothing, None)
            model = dataclasses.asdict(settled.decision.plan.request.model)
            content = {"config": dataclasses.asdict(settled.config), "model": json.loads(json.dumps(model))}
            content |= {"figures": figures, "probe": settled.to_json()["probe"]}
            out.write_text(json.dumps(content))
    finally:
        distributed.stop()


def planner_version() -> str:
    """The commit that changed the planner last."""
    command = ["git", "log", "-1", "--format=%h", "--", "wandistill/planner"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the table."""
    path.write_text(yaml.safe_dump(rows, sort_keys=False, width=120))


if __name__ == "__main__":
    main()
