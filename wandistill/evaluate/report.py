"""report.html: one file that shows a run, to be opened anywhere; no network, no script. No torch.

Every text that comes from outside (prompts, paths, settings) goes through `html.escape`, and the page's own content
security policy forbids everything but inline pictures and styles.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import datetime, timezone
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from wandistill import __version__
from wandistill.config import FIELDS
from wandistill.evaluate.report_charts import training_section, velocity_card
from wandistill.evaluate.report_memory import placement_section
from wandistill.evaluate.report_pictures import pair_width, pictures_section, samples_section, strip_columns
from wandistill.evaluate.rundir import REPORT_FILE, RunDirectory, read_run, write_text_atomically
from wandistill.evaluate.summary import count, percent, summary_rows
from wandistill.units import format_seconds


def write_report(run_dir: Path) -> Path:
    """Writes report.html from what is in `run_dir`, and returns its path; what is missing is said on the page.

    Raises:
        ConfigError: no such directory, or a damaged JSON file in it.
        TrainingFailed: the disk is full or not writable.
    """
    run = read_run(run_dir)
    path = run_dir / REPORT_FILE
    write_text_atomically(path, render(run))
    return path


def render(run: RunDirectory) -> str:
    """The page."""
    sections = [
        _header(run),
        _notices(run),
        pictures_section(run),
        _evaluation_section(run),
        training_section(run),
        placement_section(run),
        samples_section(run),
        _configuration_section(run),
        f"<footer>{escape(str(run.path))}, shown by wandistill {escape(__version__)}.</footer>",
    ]
    template = Template(resources.files(__package__).joinpath("report_template.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"wandistill: {_title(run)}"),
        body="\n".join(section for section in sections if section),
        pair_width=pair_width(run),
        strip_columns=strip_columns(run),
    )


def _header(run: RunDirectory) -> str:
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(text)}</span></div>' for value, text in _tiles(run)
    )
    return (
        f'<header><p class="eyebrow">Distillation report</p><h1>{escape(_title(run))}</h1>'
        f'<p class="lead">{escape(_lead(run))}</p><p class="soft">{escape(_when(run))}</p>'
        + (f'<div class="tiles">{tiles}</div>' if tiles else "")
        + "</header>"
    )


def _title(run: RunDirectory) -> str:
    config = run.record.get("config", {})
    if not config:
        return f"The run in {run.path.name}"
    return f"{Path(str(config.get('student_config', 'student'))).stem}, distilled from {config.get('teacher_path')}"


def _lead(run: RunDirectory) -> str:
    teacher, student = run.record.get("teacher", {}), run.record.get("student", {})
    if not teacher or not student:
        return "This directory holds no run.json that says what was distilled."
    experts = len(teacher.get("experts", ())) or 1
    each = count(teacher.get("parameters", 0) / experts)
    size = f"{each} parameters" if experts == 1 else f"{experts} experts of {each} parameters each"
    blocks = student.get("blocks", ())
    taken = f" ({', '.join(map(str, blocks))} of the teacher's)" if len(blocks) <= 24 else ""
    return (
        f"The teacher {teacher.get('path')} has {size}. The student has {count(student.get('parameters', 0))} in "
        f"{len(blocks)} blocks{taken}, draws single pictures, and needs no guidance: it is folded in."
    )


def _when(run: RunDirectory) -> str:
    """When it ran, how far and how long."""
    tries = run.record.get("history", ())
    parts = []
    if run.metrics:
        total = run.record.get("steps")
        parts.append(f"{run.metrics[-1]['step']:,} steps" + (f" of {total:,}" if isinstance(total, int) else ""))
    seconds = sum(entry["ended"] - entry["started"] for entry in tries if "ended" in entry)
    if seconds:
        parts.append(f"{format_seconds(seconds)} in all")
    if len(tries) > 1:
        parts.append(f"started {len(tries)} times")
    if tries:
        began = datetime.fromtimestamp(tries[0]["started"], tz=timezone.utc)
        ranks = tries[-1].get("world_size", 1)
        parts.append(f"{ranks} rank{'s' if ranks != 1 else ''} on {_machine(run)}")
        parts.append(f"{began:%Y-%m-%d %H:%M} UTC")
    return ", ".join(parts)


def _machine(run: RunDirectory) -> str:
    device = run.record.get("config", {}).get("device", "")
    return "a CPU" if device == "cpu" else _versions(run).get("gpu", "a GPU")


def _tiles(run: RunDirectory) -> list[tuple[str, str]]:
    """The few figures that say most."""
    found = run.evaluation
    if found is None:
        return []
    tiles = []
    if "student_accuracy" in found:
        tiles.append((percent(found["student_accuracy"]), "of captions wholly right, student"))
        tiles.append((percent(found["teacher_accuracy"]), "of captions wholly right, teacher"))
    else:
        error = found["velocity_error"]["relative_l2"]
        tiles.append(("–" if error is None else percent(error), "velocity error, relative L2"))
    share = found["student_parameters"] / found["teacher_expert_parameters"]
    whole = found["teacher_expert_parameters"] == found["teacher_parameters"]
    tiles.append((percent(share), f"of {'the teacher' if whole else 'one expert'}'s parameters"))
    teacher, student = found["teacher_seconds_per_image"], found["student_seconds_per_image"]
    tiles.append((f"{teacher / student:.1f}x", f"as fast: {format_seconds(student)} a picture"))
    return tiles


def _notices(run: RunDirectory) -> str:
    directory = shlex.quote(str(run.path))
    texts = []
    if run.record.get("state") not in (None, "finished"):
        texts.append("The run has not finished: the same command of <code>wandistill train</code> continues it.")
    if not run.record:
        texts.append("run.json is missing: <code>wandistill train</code> writes it.")
    if run.evaluation is None:
        texts.append(
            "The student has not been compared with its teacher yet, so figures and pictures of both are missing: "
            f"<code>wandistill evaluate {escape(directory)}</code> adds them to this page."
        )
    elif run.evaluation_is_stale:
        texts.append(
            "The student is another one than the figures and pictures show: "
            f"<code>wandistill evaluate {escape(directory)}</code> renews them."
        )
    return "".join(f'<p class="note">{text}</p>' for text in texts)


def _evaluation_section(run: RunDirectory) -> str:
    found = run.evaluation
    if found is None:
        return ""
    rows = "".join(
        f"<tr><th>{escape(what)}</th><td>{escape(teacher)}</td><td>{escape(student)}</td></tr>"
        for what, teacher, student in summary_rows(found)
    )
    conditions = (
        f"{found['prompts']} prompts ({found['prompt_source']}), {'x'.join(map(str, found['resolution']))} pixels, "
        f"both from the same noise, flow shift {found['flow_shift']:g}, seed {found['seed']}; batches of "
        f"{found['batch_size']} on {_device(found)}; teacher in {found['teacher_dtype']}, student in "
        f"{found['student_dtype']}. Decoding takes {format_seconds(found['decode_seconds_per_image'])} more a picture."
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in found["notes"])
    return (
        f'<section><h2>Student against teacher</h2><p class="soft">{escape(conditions)}</p>{notes}<div class="charts">'
        '<div class="card figures"><table><thead><tr><th></th><th>teacher</th><th>student</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{velocity_card(found)}</div></section>"
    )


def _device(found: Mapping[str, Any]) -> str:
    return f"{found['threads']} CPU threads" if found["device"] == "cpu" else str(found["device"])


def _configuration_section(run: RunDirectory) -> str:
    config = run.record.get("config", {})
    tables = []
    if config:
        tables.append(_details("All settings", _settings_rows(config)))
    student = run.record.get("student", {}).get("config", {})
    if isinstance(student, Mapping) and student:
        tables.append(_details("The student's shape", "".join(_row(name, value) for name, value in student.items())))
    if _versions(run):
        tables.append(_details("Versions", "".join(_row(name, value) for name, value in _versions(run).items())))
    return f"<section><h2>Configuration</h2>{''.join(tables)}</section>" if tables else ""


def _settings_rows(config: Mapping[str, Any]) -> str:
    """The settings by their groups in `--help`, those that differ from the defaults in bold."""
    groups: dict[str, list[str]] = {}
    for name, value in config.items():
        field = FIELDS.get(name)
        group = field.metadata["group"] if field else "other"
        groups.setdefault(group, []).append(_row(name, value, changed=field is not None and value != field.default))
    return "".join(
        f'<tr class="group"><th colspan="2">{escape(group)}</th></tr>{"".join(rows)}' for group, rows in groups.items()
    )


def _row(name: str, value: Any, *, changed: bool = False) -> str:
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    kind = ' class="changed"' if changed else ""
    return f"<tr><th>{escape(name)}</th><td{kind}>{escape(shown) or '<span class=soft>none</span>'}</td></tr>"


def _details(title: str, rows: str) -> str:
    return f"<details><summary>{escape(title)}</summary><table><tbody>{rows}</tbody></table></details>"


def _versions(run: RunDirectory) -> Mapping[str, str]:
    return run.record.get("versions", {})
