"""Makes the embedded teacher and its judge from nothing, on one GPU in about a quarter of an hour.

    python -m wandistill.demo.train_teacher --output_dir DIR        # makes DIR/teacher and DIR/judge.safetensors
    python -m wandistill.demo.train_teacher --evaluate DIR/teacher  # measures a packed teacher again, prints JSON

Each stage leaves its result in the work folder; a run that was interrupted goes on after its last finished stage.
"""

import argparse
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wandistill.demo.evaluation import evaluate_teacher, missed_targets
from wandistill.demo.judge import load_judge
from wandistill.demo.recipe import FULL, TINY, EvaluationRecipe
from wandistill.demo.stages import TeacherRun, hardware, make_teacher, software
from wandistill.demo.training import Log


def evaluate_folder(folder: Path, captions: int, device: torch.device, log: Log) -> dict[str, Any]:
    """Accuracy of a packed teacher, by the judge beside its folder or else the shipped one."""
    beside = folder.resolve().parent / "judge.safetensors"
    judge = load_judge(path=beside if beside.exists() else None)
    recipe = replace(EvaluationRecipe(), captions=captions, judged_scenes=max(64, captions))
    return {
        "schema": 1,
        "teacher": str(folder),
        **evaluate_teacher(folder, judge, recipe, device, log),
        "evaluated_on": f"{hardware(device)}, {software()}",
    }


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m wandistill.demo.train_teacher", description=(__doc__ or "").split("\n")[0]
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output_dir", "--output-dir", type=Path, help="where teacher/ and judge.safetensors go")
    what.add_argument("--evaluate", type=Path, metavar="DIR", help="measure the packed teacher in DIR and print JSON")
    parser.add_argument("--work_dir", "--work-dir", type=Path, help="finished stages (default: OUTPUT_DIR-work)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a few steps of each stage, to see that they run")
    parser.add_argument("--captions", type=int, default=512, help="held-out captions for --evaluate (default: 512)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    if arguments.evaluate and not (arguments.evaluate / "model_index.json").exists():
        parser.error(f"--evaluate {arguments.evaluate}: there is no model_index.json in this folder")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """0 done; 2 bad arguments; 3 the training failed or its teacher misses a target (it stays in the work folder)."""
    arguments = _arguments(argv)
    started = time.perf_counter()
    device = torch.device(arguments.device)

    def log(message: str) -> None:
        print(f"{time.perf_counter() - started:7.1f} s  {message}", file=sys.stderr, flush=True)

    if arguments.evaluate:
        print(json.dumps(evaluate_folder(arguments.evaluate, arguments.captions, device, log), indent=2))
        return 0
    output: Path = arguments.output_dir
    work = arguments.work_dir or output.with_name(output.resolve().name + "-work")
    run = TeacherRun(TINY if arguments.tiny else FULL, arguments.seed, device, work, log)
    try:
        packed, record = make_teacher(run)
    except ValueError as error:
        log(f"error: {error}")
        return 2
    except FloatingPointError as error:
        log(f"error: {error}")
        return 3
    missed = [] if arguments.tiny else missed_targets(record["accuracy"])
    if missed:
        log(f"The teacher in {packed} misses its targets and was not copied to {output}: {'; '.join(missed)}")
        return 3
    shutil.rmtree(output / "teacher", ignore_errors=True)
    shutil.copytree(packed, output, dirs_exist_ok=True)
    log(f"The teacher is in {output / 'teacher'}, its judge in {output / 'judge.safetensors'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
