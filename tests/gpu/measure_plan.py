"""`python -m tests.gpu.measure_plan`: the planner's predictions against what real GPUs then measure.

Each configuration is a short run of `wandistill train` on a teacher of random weights in the shape of a published one.
A run measures the machine and writes its plan before it loads anything: this copies it into tests/gpu/measured.yaml at
once, and what run.json says in the end is put beside it. A third of the configurations is drawn at random, so that no
number can be fitted to them. `tests/unit/test_measured_plans.py` replays the planner against the table.

On one GPU twelve are the eight fixed ones and `--drawn 4`. A command of 10 minutes holds five or six: about 90 s each
of 14B, 45 s of 1.3B, and 40 s once for each teacher that is written to --work. Number 3, at disk, takes 17 s a step. So
`--fixed 0 1 2 4 5 --drawn 0`, then `--fixed 6 7 --drawn 4`, then `--fixed 3 --drawn 0`.

On a machine without a GPU, `--tiny` goes through the same steps with tiny teachers on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu import table
from wandistill.catalog import find_gpu, find_model, model_from_folder
from wandistill.config import from_mapping
from wandistill.errors import DoesNotFit
from wandistill.planner.from_config import request_of_config
from wandistill.planner.plan import plan
from wandistill.planner.request import Machines
from wandistill.student_config import student_spec

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [f"a large red circle left of {number} small blue squares" for number in range(32)]
# Students that a card of 80 GB trains beside a teacher of that shape.
STUDENTS = {"wan2.1-t2v-1.3b": ("1b", "half", "quarter"), "wan2.1-t2v-14b": ("1b",)}
SHAPES = tuple(STUDENTS)
# Settings that are measured whatever is drawn: teacher's shape, ranks, flags of wandistill train.
FIXED: list[tuple[str, int, dict[str, Any]]] = [
    ("wan2.1-t2v-14b", 1, {"teacher_device_strategy": "gpu", "student_config": "1b"}),
    ("wan2.1-t2v-14b", 1, {"teacher_device_strategy": "stream", "student_config": "1b", "batch_size": 4}),
    ("wan2.1-t2v-14b", 1, {"teacher_device_strategy": "offload", "student_config": "1b"}),
    ("wan2.1-t2v-14b", 1, {"teacher_device_strategy": "disk", "student_config": "1b"}),
    ("wan2.1-t2v-1.3b", 1, {"teacher_device_strategy": "gpu", "student_config": "half", "resolution": "1024x1024"}),
    ("wan2.1-t2v-1.3b", 1, {"teacher_device_strategy": "cpu", "student_config": "quarter", "resolution": "256x256"}),
    (
        "wan2.1-t2v-14b",
        1,
        {"teacher_device_strategy": "stream", "student_config": "1b", "teacher_dtype": "int8", "resolution": "480x480"},
    ),
    (
        "wan2.1-t2v-1.3b",
        1,
        {"teacher_device_strategy": "gpu", "student_config": "half", "teacher_dtype": "int8", "resolution": "480x480"},
    ),
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
# The student's weights are random: measuring which of the teacher's to take would be half of the time of a run.
COMMON = {
    "max_steps": 8,
    "rollout_steps": 1,
    "warmup_steps": 1,
    "checkpoint_interval": 8,
    "guidance_scale": 4.0,
    "init": "random",
}
# Seconds between two looks for a run's plan, and characters of what a failed run said that are shown.
_POLL, _TOLD = 0.1, 3000
TINY = {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 128, "text_dim": 32}


def main() -> None:
    """Measures and leaves the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="GPUs, or with --tiny processes, to use at most")
    parser.add_argument("--fixed", type=int, nargs="*", help="numbers of the fixed ones; else all that the GPUs allow")
    parser.add_argument("--drawn", type=int, help="how many to draw at random; else half as many as the fixed ones")
    parser.add_argument("--longest", type=float, default=3.0, help="seconds of a step that a drawn one may take")
    parser.add_argument("--out", type=Path, default=table.MEASURED, help="its section `plans` grows")
    parser.add_argument("--keep", type=Path, help="a folder for each run's run.json, memory profile and last snapshots")
    parser.add_argument("--commit", help="of the code, outside a git repository")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "measure-plan", help="a fast disk")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny teachers on the CPU: checks this script, not the plan"
    )
    args = parser.parse_args()
    rows = table.read("plans", args.out)
    wanted = chosen(args.fixed, args.drawn, args.gpus, args.longest)
    failed: list[str] = []
    planner, on = planner_version(), table.machine(args.commit)
    while wanted:
        shape, ranks, settings, drawn = wanted.pop(0)
        print(f"{shape}, {ranks} ranks, {settings}", flush=True)
        config = prepared(args.work, shape, settings, tiny=args.tiny)
        row = {"shape": shape, "ranks": ranks, "drawn": drawn, "settings": settings, "planner": planner, "on": on}
        rows.append({**row, "measured": None})

        def told(**parts: Any) -> None:
            rows[-1] |= parts
            table.write("plans", rows, args.out)

        code, said = run(ranks, config, args.work, args.keep and args.keep / str(len(rows) - 1), told)
        if code == 0:
            continue
        print(said, flush=True)
        if code == DoesNotFit.exit_code:
            rows.pop()
            if drawn:
                wanted.append((*draw(random.SystemRandom(), args.gpus, args.longest), True))
        else:
            failed.append(f"{shape}, {ranks} ranks, {settings}: ended with {code}")
    if failed:
        sys.exit("\n".join(failed))


def chosen(
    numbers: list[int] | None, count: int | None, gpus: int, longest: float
) -> list[tuple[str, int, dict[str, Any], bool]]:
    """Shape, ranks, settings, and whether they were drawn."""
    fixed = [FIXED[number] for number in numbers] if numbers is not None else [run for run in FIXED if run[1] <= gpus]
    drawn = count if count is not None else math.ceil(len(fixed) / 2)
    source = random.SystemRandom()
    return [(*run, False) for run in fixed] + [(*draw(source, gpus, longest), True) for _ in range(drawn)]


def draw(source: random.Random, gpus: int, longest: float) -> tuple[str, int, dict[str, Any]]:
    """A configuration at random, of those that fit and take at most `longest` seconds a step by the plan."""
    while True:
        ranks = source.choice([count for count in (1, 2, 4, 8) if count <= gpus])
        settings = {name: source.choice(values) for name, values in DRAWN.items()}
        settings["teacher_device_strategy"] = source.choice(ALONE if ranks == 1 else ALONE + TOGETHER)
        shape = source.choice(SHAPES)
        settings["student_config"] = source.choice(STUDENTS[shape])
        if settings["optimizer"] != "adamw":
            settings["mixed_precision"] = "no"
        if expected_seconds(shape, ranks, settings) <= longest:
            return shape, ranks, settings


def expected_seconds(shape: str, ranks: int, settings: dict[str, Any]) -> float:
    """Of a step, by the catalogue's figures of this machine's GPU; infinite where it does not fit."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    gpu, model = find_gpu(torch.cuda.get_device_name()), find_model(shape)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machines = Machines(gpu, ranks, 1, host_memory=memory, cores=len(os.sched_getaffinity(0)))
    config = from_mapping({**COMMON, **settings, "teacher_path": shape, "data_path": "prompts.txt"})
    answer = plan(request_of_config(config, model, student_spec(config.student_config, model.architecture), machines))
    return answer.choice.time.step if answer.choice and answer.choice.time else math.inf


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

    from tests.engine_setup import write_random
    from tests.tiny_wan import LAYOUTS, build_tiny_wan

    build_tiny_wan(LAYOUTS["t2v-1.3b"], folder)
    own = TINY if tiny else find_model(shape).architecture.to_config()
    # The text encoder stays as it is.
    write_random(folder, dtype=torch.bfloat16, **{name: own[name] for name in own if name != "text_dim"})


def run(
    ranks: int, config: dict[str, Any], work: Path, keep: Path | None, told: Callable[..., None]
) -> tuple[int, str]:
    """A world of ranks trains; returns its exit code and, after an error, the end of what it said.

    Args:
        keep: a folder for the run's files.
        told: called with `predicted` as soon as the run has written its plan (figures of the plan, and what it takes to
            plan again elsewhere), and with `measured` at the end.
    """
    with tempfile.TemporaryDirectory(dir=work) as folder:
        file, record, log = Path(folder) / "config.json", Path(folder) / "out" / "run.json", Path(folder) / "log"
        file.write_text(json.dumps({**config, "output_dir": str(record.parent)}))
        command = [sys.executable, "-m", "wandistill", "launch", f"--nproc={ranks}", "--", "--config", str(file)]
        threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
        env = {**os.environ, "OMP_NUM_THREADS": threads}
        if keep:
            keep.mkdir(parents=True, exist_ok=True)
            env["WANDISTILL_METRICS_DIR"] = str(keep)
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=env)
        predicted: dict[str, Any] = {}
        while process.poll() is None:
            if not predicted and (content := _json(record)) and "plan" in content:
                predicted = {name: content[name] for name in ("config", "plan", "probe")} | {"model": _model(config)}
                told(predicted=predicted)
            time.sleep(_POLL)
        content = _json(record)
        if keep:
            for path in (record, record.with_name("memory_profile.json"), record.with_name("metrics.jsonl"), log):
                if path.exists():
                    shutil.copy(path, keep)
        if process.returncode == 0:
            told(measured=content["memory"])
        return process.returncode, "" if process.returncode == 0 else log.read_text()[-_TOLD:]


def _json(file: Path) -> dict[str, Any]:
    """A run's record; empty while there is none."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def _model(config: dict[str, Any]) -> dict[str, Any]:
    """What the plan knows of the teacher."""
    return dict(json.loads(json.dumps(dataclasses.asdict(model_from_folder(Path(config["teacher_path"]))))))


def planner_version() -> str:
    """A digest of the planner's files: rows of another planner are no proof of this one."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "wandistill" / "planner").glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    main()
