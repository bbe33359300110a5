"""What a run left in its output directory, read back. No torch.

The trainer writes run.json (the run itself), metrics.jsonl (a line per optimizer step), student/ and samples/;
`wandistill evaluate` adds evaluation.json and the folder evaluation/ with pictures.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandistill.config import FIELDS, TrainConfig, from_mapping
from wandistill.errors import ConfigError, TrainingFailed

EVALUATION_FILE = "evaluation.json"
PICTURES_FOLDER = "evaluation"
PICTURES_FILE = "pictures.json"
REPORT_FILE = "report.html"

_KEY_BYTES = 2**16


@dataclass(frozen=True)
class RunDirectory:
    """An output directory; what is missing in it is None or empty."""

    path: Path
    record: Mapping[str, Any] = field(default_factory=dict)
    """run.json"""
    metrics: tuple[Mapping[str, Any], ...] = ()
    """The lines of metrics.jsonl, one per optimizer step, in order."""
    evaluation: Mapping[str, Any] | None = None
    pictures: tuple[Mapping[str, Any], ...] = ()
    """Pairs of pictures: prompt, file names below evaluation/, verdicts."""

    @property
    def config(self) -> TrainConfig:
        """The run's configuration; settings that this version doesn't know are left out."""
        stored = self.record.get("config", {})
        return from_mapping({name: value for name, value in stored.items() if name in FIELDS})

    @property
    def student(self) -> Path:
        """The exported student, a WanPipeline folder."""
        return self.path / "student"

    @property
    def evaluation_is_stale(self) -> bool:
        """Whether the student is another one than the one that was evaluated."""
        known = self.evaluation.get("student_key") if self.evaluation else None
        return known is not None and known != student_key(self.student)

    def sample_steps(self) -> list[tuple[int, Path]]:
        """(optimizer step, folder) of the pictures drawn during training, in the order of the steps."""
        stored = self.record.get("config", {}).get("sample_dir")
        root = Path(stored) if stored else self.path / "samples"
        folders = root.glob("step-*") if root.is_dir() else ()
        steps = [(re.fullmatch(r"step-(\d+)", f.name), f) for f in folders if f.is_dir()]
        return sorted((int(match.group(1)), folder) for match, folder in steps if match)


def read_run(path: Path) -> RunDirectory:
    """The output directory at `path`.

    Raises:
        ConfigError: `path` is no directory, or one of its JSON files is damaged.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: is not a directory; give the --output_dir of a run of `wandistill train`.")
    pictures = read_json(path / PICTURES_FOLDER / PICTURES_FILE) or {}
    return RunDirectory(
        path=path,
        record=read_json(path / "run.json") or {},
        metrics=_read_metrics(path / "metrics.jsonl"),
        evaluation=read_json(path / EVALUATION_FILE),
        pictures=tuple(pictures.get("pictures", ())),
    )


def read_finished_run(path: Path) -> RunDirectory:
    """As `read_run`, of a run whose student is exported; ConfigError says what is missing."""
    run = read_run(path)
    if not run.record:
        raise ConfigError(
            f"{path}: holds no run.json, so it is not the --output_dir of a run; give the directory that "
            "`wandistill train` wrote."
        )
    if not (run.student / "model_index.json").is_file():
        raise ConfigError(
            f"{run.student}: the run has not exported its student yet; let `wandistill train` finish (the same "
            "command continues it), or export a checkpoint with `wandistill export`."
        )
    return run


def student_key(student: Path) -> str:
    """A key of a student's weights that copying keeps and training changes: SHA-256 of the sizes, first and last 64 KiB
    of its files, since a student of gigabytes should not be read whole for it."""
    key = hashlib.sha256()
    for path in sorted(student.glob("transformer/*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            key.update(f"{path.name} {size}\n".encode() + file.read(_KEY_BYTES))
            file.seek(max(size - _KEY_BYTES, 0))
            key.update(file.read())
    return key.hexdigest()


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None where there is no such file; ConfigError where it is damaged."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not JSON ({error}); remove it and make it again.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds a {type(content).__name__} instead of an object; remove it.")
    return content


def write_text_atomically(path: Path, text: str) -> None:
    """Writes `text` beside `path` and renames it, so that `path` is never half-written.

    Raises:
        TrainingFailed: the disk is full or not writable.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> TrainingFailed:
    """The error for a file or folder that could not be written."""
    return TrainingFailed(f"{path} could not be written ({error.strerror}): make room there, or make it writable.")


def _read_metrics(path: Path) -> tuple[dict[str, Any], ...]:
    """The lines of metrics.jsonl; a line that a kill cut short is left out."""
    if not path.is_file():
        return ()
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append(entry)
    return tuple(entries)
