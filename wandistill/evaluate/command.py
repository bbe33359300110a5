"""`wandistill evaluate`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from wandistill.evaluate.evaluation import Options, evaluate
from wandistill.evaluate.report import write_report
from wandistill.evaluate.rundir import write_text_atomically
from wandistill.evaluate.summary import summary_rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run's directory and the conditions."""
    parser.add_argument("run_dir", metavar="DIR", type=Path, help="the --output_dir of a finished run")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the figures here too")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="prompts to compare on (.txt, .csv, .jsonl, .parquet); default: held-out captions of the embedded "
        "teacher, else the run's sample prompts, else the end of its data",
    )
    parser.add_argument("--column", default="", help="column of --prompts; default: prompt, caption or text")
    parser.add_argument("--count", type=int, help="most prompts (default: 512 with the embedded teacher, else 64)")
    parser.add_argument("--steps", type=int, help="the student's steps (default: the run's --sample_steps)")
    parser.add_argument(
        "--teacher_steps",
        "--teacher-steps",
        type=int,
        help="the teacher's steps (default: the larger of --steps and the run's --rollout_steps)",
    )
    parser.add_argument("--teacher_path", "--teacher-path", help="the teacher, where it has moved since the run")
    parser.add_argument("--seed", type=int, default=0, help="of the noise and of the held-out captions (default: 0)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: auto)")
    parser.add_argument("--batch_size", "--batch-size", type=int, help="prompts at a time (default: by resolution)")


def run(args: argparse.Namespace) -> int:
    """Evaluates, renews report.html, prints; returns 0."""
    options = Options(
        prompts=args.prompts,
        column=args.column,
        count=args.count,
        steps=args.steps,
        teacher_steps=args.teacher_steps,
        seed=args.seed,
        device=args.device,
        batch_size=args.batch_size,
        teacher_path=args.teacher_path,
    )
    result = evaluate(args.run_dir, options)
    report = write_report(args.run_dir)
    text = json.dumps(result, indent=1)
    if args.output is not None:
        write_text_atomically(args.output, text + "\n")
    print(text if args.json else _as_text(result, report))
    return 0


def _as_text(result: dict[str, Any], report: Path) -> str:
    rows = [("", "teacher", "student"), *summary_rows(result)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows]
    return "\n".join([*lines, *(f"note: {note}" for note in result["notes"]), f"The page to look at: {report}"])
