"""An output directory as a finished and evaluated run leaves it, made up without torch, for tests of the report."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import struct
import zlib
from pathlib import Path
from typing import Any

from wandistill.config import TrainConfig

HOSTILE_PROMPT = """a <script>alert("x")</script> & 'red' </title> "circle" $title ${body} <img src=x onerror=y>"""
STEPS = 300


def write_run(folder: Path, *, pictures: int = 9, steps: int = STEPS, **config: Any) -> Path:
    """Fills `folder` with all that the report reads; the first prompt is hostile."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "run.json", _record(TrainConfig(**{"output_dir": str(folder), **config}), steps))
    rng = random.Random(0)
    lines = [json.dumps(_metrics(step, steps, rng)) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    _write_json(folder / "evaluation.json", evaluation())
    write_pictures(folder / "evaluation", pictures, rng)
    for step in (75, 150, 225, 300):
        sample = folder / "samples" / f"step-{step}"
        for index in range(2):
            write_png(sample / f"{index:02d}.png", _blob(rng))
        (sample / "prompts.txt").write_text("a small red circle\na large blue square\n")
    return folder


def write_pictures(folder: Path, count: int, rng: random.Random) -> None:
    """`count` pairs of pictures and pictures.json."""
    entries = []
    for index in range(count):
        files = {side: f"{side}-{index:03d}.png" for side in ("teacher", "student")}
        color = _blob(rng)
        for file in files.values():
            write_png(folder / file, color)
        verdicts = {side: {"right": True, "objects": True, "relation": True, "background": True} for side in files}
        if index % 4 == 3:
            verdicts["student"] |= {"right": False, "relation": False}
        prompt = HOSTILE_PROMPT if index == 0 else f"a small red circle left of blue square {index} on white"
        entries.append({"prompt": prompt, **files, "verdict": verdicts})
    _write_json(folder / "pictures.json", {"schema": 1, "pictures": entries})


def evaluation() -> dict[str, Any]:
    """evaluation.json of a two-expert teacher with a judge."""
    shares = {"objects": 1.0, "relation": 0.99, "background": 1.0, "size": 0.98, "right": 0.98}
    buckets = [(i / 8, (i + 1) / 8, "transformer" if i == 7 else "transformer_2") for i in range(2, 8)]
    error = {"relative_l2": 0.087, "mse": 0.012, "target_mean_square": 1.6, "states": 1024}
    return {
        "schema": 1,
        "teacher": "embedded",
        "prompts": 512,
        "prompt_source": "held-out captions of the embedded teacher's scenes",
        "prompts_in_training_data": 0,
        "resolution": [64, 64],
        "steps": 8,
        "teacher_steps": 8,
        "guidance_scale": 4.0,
        "guidance_scale_2": 3.0,
        "flow_shift": 3.0,
        "boundary": 0.875,
        "seed": 0,
        "batch_size": 64,
        "device": "cpu",
        "threads": 2,
        "teacher_dtype": "float32",
        "student_dtype": "float32",
        "teacher_accuracy": 1.0,
        "student_accuracy": 0.984375,
        "judge": {"teacher": shares | {"right": 1.0}, "student": shares},
        "teacher_parameters": 10256384,
        "teacher_expert_parameters": 5128192,
        "student_parameters": 2751360,
        "teacher_seconds_per_image": 0.042,
        "student_seconds_per_image": 0.0113,
        "decode_seconds_per_image": 0.012,
        "latent_distance": 0.213,
        "latent_distance_unrelated": 1.18,
        "pixel_distance": 0.041,
        "pixel_distance_unrelated": 0.377,
        "velocity_error": {
            **error,
            "by_t": [
                {"t_from": low, "t_to": high, "expert": expert, **error, "relative_l2": 0.06 + 0.3 * (low - 0.6) ** 2}
                for low, high, expert in buckets
            ],
            "by_expert": {"transformer": error, "transformer_2": error},
        },
        "notes": [],
    }


def write_png(path: Path, color: tuple[int, int, int], size: int = 64) -> None:
    """A picture of one coloured square on white."""
    white, quarter = b"\xff\xff\xff", size // 4
    border = b"\0" + white * size
    middle = b"\0" + white * quarter + bytes(color) * (size - 2 * quarter) + white * quarter
    rows = [border] * quarter + [middle] * (size - 2 * quarter) + [border] * quarter
    path.parent.mkdir(parents=True, exist_ok=True)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"".join(rows))),
        (b"IEND", b""),
    )
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def _blob(rng: random.Random) -> tuple[int, int, int]:
    return (rng.randrange(256), rng.randrange(256), rng.randrange(256))


def _record(config: TrainConfig, steps: int) -> dict[str, Any]:
    return {
        "schema": 1,
        "state": "finished",
        "config": {**dataclasses.asdict(config), "device": "cpu", "resolution": "64x64"},
        "teacher": {
            "path": config.teacher_path,
            "experts": ["transformer", "transformer_2"],
            "boundary": 0.875,
            "parameters": 10256384,
        },
        "student": {"config": {"num_layers": 4}, "parameters": 2751360, "blocks": [0, 2, 5, 7]},
        "steps": steps,
        **_placement(),
        "versions": {"wandistill": "0.1.0", "torch": "2.15"},
        "history": [
            {"started": 1_790_000_000.0, "world_size": 1, "ended": 1_790_000_231.0, "step": steps, "state": "finished"}
        ],
    }


def _placement() -> dict[str, Any]:
    """Plan and memory of a run on a CPU."""
    terms = [{"term": "processes", "bytes": 2**30, "formula": "", "allocated": True}]
    terms.append({"term": "ranks' tensors", "bytes": 2**28, "formula": "", "allocated": True})
    host = {"peak_bytes": 2**30 + 2**28, "peak_allocated_bytes": 2**30, "phase": "training", "terms": terms}
    return {
        "plan": {
            "placement": "gpu",
            "why": "gpu fits, and no placement is faster",
            "forced": "",
            "ranks": [{"rank": 0, "peak_bytes": 2**28, "phase": "student", "terms": terms[1:]}],
            "host": host,
        },
        "memory": {
            "placement": "gpu",
            "gpu": [],
            "host": [{"node": 0, "predicted_bytes": 2**30 + 2**28, "measured_bytes": 2**30}],
            "step_seconds": {"predicted": 0.4, "measured": 0.5},
        },
    }


def _metrics(step: int, steps: int, rng: random.Random) -> dict[str, Any]:
    loss = (0.02 + 0.6 * math.exp(-8 * step / steps)) * math.exp(rng.gauss(0, 0.12))
    teacher, student = 0.21 + 0.01 * rng.random(), 0.14 + 0.02 * rng.random()
    return {
        "schema": 1,
        "step": step,
        "loss": loss,
        "lr": 1e-3,
        "grad_norm": loss * 3,
        "teacher_seconds": teacher,
        "student_seconds": student,
        "step_seconds": teacher + student + 0.02,
        "gpu_peak_bytes": 0,
        "host_rss_bytes": int(1.3e9 + 1e8 * min(step / 40, 1)),
    }


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
