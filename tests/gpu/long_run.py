"""`python -m tests.gpu.long_run`: a whole training run at `stream`, from a cold folder, watched from outside.

The teacher has two experts of random weights in the shape of a published 14 B one, in real sharded safetensors; the
second expert's shards are hard links, so that a small disk holds both. Its files are written out and dropped from the
page cache, then `wandistill train` distils it into a student of half the depth: weights and gradients in bfloat16,
8-bit moments, gradient checkpointing. Four times a second this looks at the rank's memory (its snapshot and /proc) and
at the bytes that it has read from disk. Step times, memory beside the plan, what grew over the steps, and the time from
the start to the first step beside what the disk gives go into tests/gpu/measured.yaml, section `long_run`.

On a machine without a GPU, `--tiny` goes through the same steps with a tiny teacher on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path
from typing import Any

from tests.gpu import table
from tests.gpu.measure_plan import PROMPTS, ROOT, TINY
from wandistill.catalog import find_model

SHAPE = "wan2.1-t2v-14b"
SETTINGS: dict[str, Any] = {
    "teacher_device_strategy": "stream",
    "teacher_dtype": "bfloat16",
    "student_config": "half",
    "init": "high",
    "optimizer": "adamw8bit",
    "gradient_checkpointing": True,
    "resolution": "832x480",
    "batch_size": 4,
    "guidance_scale": 4.0,
    "rollout_steps": 1,
    "warmup_steps": 5,
    "save_samples": False,
}
ON_CPU = {"device": "cpu", "teacher_dtype": "float32", "optimizer": "adamw", "resolution": "64x64"}
# Steps that warm up: kernels are compiled and loaded, the optimizer makes its moments.
WARM_UP = 5
_ITEMS = 8
_POLL = 0.25
# How the disk is measured: reads past the page cache, so many at a time and so long, of so many bytes together.
_READERS, _READ, _MEASURED = 8, 4 << 20, 6 << 30


def main() -> None:
    """Runs, and adds a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=table.MEASURED, help="its section `long_run` grows")
    parser.add_argument("--keep", type=Path, required=True, help="a folder for log, run.json and what was seen")
    parser.add_argument("--commit", help="of the code, outside a git repository")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "long-run", help="for the teacher")
    parser.add_argument("--output", type=Path, default=Path("/dev/shm/long-run"), help="for checkpoint and student")
    parser.add_argument("--tiny", action="store_true", help="a tiny teacher on the CPU: checks this script")
    args = parser.parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    folder = args.work / "teacher"
    if not folder.exists():
        write_teacher(folder, tiny=args.tiny)
    shards = sorted(folder.glob("transformer*/*.safetensors"))
    settings = (
        SETTINGS
        | {"max_steps": args.steps, "checkpoint_interval": args.steps, "keep_checkpoints": 1}
        | (ON_CPU if args.tiny else {})
    )
    prompts = args.work / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS[:_ITEMS]))
    config = {**settings, "teacher_path": str(folder), "data_path": str(prompts), "output_dir": str(args.output)}
    file = args.work / "config.json"
    file.write_text(json.dumps(config))
    drop_from_cache(folder)
    disk = disk_rate(shards)
    print(f"disk: {disk / 1e9:.2f} GB/s", flush=True)
    seen, code = watch(file, args.keep, args.output)
    for name in ("run.json", "metrics.jsonl"):
        if (args.output / name).exists():
            (args.keep / name).write_bytes((args.output / name).read_bytes())
    if code:
        sys.exit(f"the run ended with {code}:\n{(args.keep / 'log').read_text()[-3000:]}")
    steps = [json.loads(line) for line in (args.output / "metrics.jsonl").read_text().splitlines()]
    row = {
        "shape": SHAPE,
        "experts": 2,
        "settings": settings,
        "disk_bytes_per_second": {"before": disk, "after": disk_rate(shards)},
        "cold_start": cold_start(seen, sum(shard.stat().st_size for shard in shards)),
        "steps": step_times(steps),
        "over_the_steps": over_the_steps(seen, args.steps),
        "memory": json.loads((args.output / "run.json").read_text())["memory"],
        "on": table.machine(args.commit),
    }
    print(json.dumps({name: row[name] for name in list(row)[3:-1]}, indent=1))
    table.write("long_run", [*table.read("long_run", args.out), row], args.out)


def write_teacher(folder: Path, *, tiny: bool) -> None:
    """A teacher with two experts; the second has the first one's shards."""
    import shutil

    import torch

    from tests.engine_setup import write_random
    from tests.tiny_wan import LAYOUTS, build_tiny_wan

    build_tiny_wan(LAYOUTS["t2v-a14b"], folder)
    second = folder / "transformer_2"
    shutil.rmtree(second)
    own = TINY if tiny else find_model(SHAPE).architecture.to_config()
    # The text encoder stays as it is.
    write_random(folder, dtype=torch.bfloat16, **{name: own[name] for name in own if name != "text_dim"})
    shutil.copytree(folder / "transformer", second, copy_function=os.link)


def drop_from_cache(folder: Path) -> None:
    """So that a read of the folder's files goes to the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def disk_rate(files: Sequence[Path]) -> float:
    """Bytes a second that several readers get of `files` together, past the page cache."""
    pieces = [(file, at) for file in files for at in range(0, file.stat().st_size - _READ, _READ)][: _MEASURED // _READ]

    def read(piece: tuple[Path, int]) -> int:
        descriptor = os.open(piece[0], os.O_RDONLY | os.O_DIRECT)
        with mmap(-1, _READ) as buffer:
            count = os.preadv(descriptor, [buffer], piece[1])
        os.close(descriptor)
        return count

    began = time.monotonic()
    with ThreadPoolExecutor(_READERS) as pool:
        count = sum(pool.map(read, pieces))
    return count / (time.monotonic() - began)


def watch(config: Path, keep: Path, output: Path) -> tuple[list[dict[str, Any]], int]:
    """Trains; what was seen at each look, seconds counted from the start, and the exit code."""
    env = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "WANDISTILL_METRICS_DIR": str(keep)}
    command = [sys.executable, "-m", "wandistill", "launch", "--nproc=1", "--", "--config", str(config)]
    seen: list[dict[str, Any]] = []
    began = time.monotonic()
    with (keep / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=env)
    with (keep / "seen.jsonl").open("w") as file:
        while process.poll() is None:
            time.sleep(_POLL)
            if look := _look(keep / "rank-0.json", output / "metrics.jsonl"):
                seen.append({"seconds": round(time.monotonic() - began, 2), **look})
                file.write(json.dumps(seen[-1]) + "\n")
                file.flush()
    return seen, process.returncode


def _look(snapshot: Path, metrics: Path) -> dict[str, Any]:
    """Of the rank, as its snapshot, the kernel and its log of steps have it now; nothing before there is a rank."""
    try:
        content = json.loads(snapshot.read_text())
        status = Path(f"/proc/{content['pid']}/status").read_text()
        io = Path(f"/proc/{content['pid']}/io").read_text()
        steps = metrics.read_text().count("\n") if metrics.exists() else 0
    except OSError:
        return {}
    samples = content["samples"]
    lines = dict(line.split(":", 1) for line in (status + io).splitlines())
    if "RssAnon" not in lines:  # it is about to end, and has no memory left
        return {}
    private, shared = (int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    states = {labels["state"]: value for labels, value in samples.get("wandistill_rank_gpu_memory_bytes", [])}
    return {
        "phase": next(labels["phase"] for labels, value in samples["wandistill_rank_phase"] if value),
        "steps": steps,
        "read_bytes": int(lines["read_bytes"]),
        "host_private_bytes": private,
        "host_shared_bytes": shared,
        **{f"gpu_{name}_bytes": states[name] for name in ("allocated", "reserved", "peak", "total", "free") if states},
    }


def cold_start(seen: list[dict[str, Any]], weights: int) -> dict[str, Any]:
    """From the start to the first step; the teacher is read while the memory that ranks share grows."""
    whole = max(look["host_shared_bytes"] for look in seen)
    loading = [look for look in seen if look["host_shared_bytes"] < 0.99 * whole and not look["steps"]]
    before = [look for look in loading if look["host_shared_bytes"] < 0.01 * weights]
    first = next(look for look in seen if look["steps"])
    began, ended = (before or seen)[-1], seen[min(len(loading), len(seen) - 1)]
    return {
        "weight_bytes": weights,
        "seconds_to_first_step": first["seconds"],
        "seconds_before_reading": began["seconds"],
        "seconds_of_reading": round(ended["seconds"] - began["seconds"], 2),
        "bytes_read_for_the_teacher": ended["read_bytes"] - began["read_bytes"],
        "bytes_read_to_first_step": first["read_bytes"],
        "phases": {
            name: next(look["seconds"] for look in seen if look["phase"] == name)
            for name in dict.fromkeys(look["phase"] for look in seen)
        },
    }


def step_times(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds, of the steps after those that warm up."""
    warm = steps[WARM_UP:]
    found: dict[str, Any] = {"count": len(steps), "first": steps[0]["step_seconds"]}
    for part in ("step_seconds", "teacher_seconds", "student_seconds", "optimizer_seconds"):
        values = [step[part] for step in warm]
        found[part] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return found


def over_the_steps(seen: list[dict[str, Any]], total: int) -> dict[str, Any]:
    """Least and most of each figure between the end of the warm-up and the last step, and how far they are apart."""
    looks = [look for look in seen if look["phase"] == "train" and WARM_UP <= look["steps"] < total]
    found: dict[str, Any] = {"looks": len(looks)}
    if not looks:
        return found
    figures = {name: [look[name] for look in looks] for name in ("host_private_bytes", "host_shared_bytes")}
    if "gpu_reserved_bytes" in looks[0]:
        figures |= {name: [look[name] for look in looks] for name in ("gpu_reserved_bytes", "gpu_peak_bytes")}
        figures["gpu_used_bytes"] = [look["gpu_total_bytes"] - look["gpu_free_bytes"] for look in looks]
    figures["host_bytes"] = [look["host_private_bytes"] + look["host_shared_bytes"] for look in looks]
    for name, values in figures.items():
        found[name] = {"first": values[0], "last": values[-1], "least": min(values), "most": max(values)}
        found[name]["spread"] = round((max(values) - min(values)) / max(max(values), 1), 5)
    return found


if __name__ == "__main__":
    main()
