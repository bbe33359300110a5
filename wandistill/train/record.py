"""What a run writes about itself: run.json and metrics.jsonl."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from wandistill import __version__
from wandistill.errors import ConfigError, TrainingFailed


def write_json(path: Path, content: Any) -> None:
    """Writes `content` beside `path` and renames it into place.

    Raises:
        TrainingFailed: the disk is full or not writable.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(content, indent=1, sort_keys=False) + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TrainingFailed(f"{path} could not be written ({error.strerror}): make room and start again.") from error


def versions() -> dict[str, str]:
    """What software and which GPU took part."""
    packages = ("diffusers", "transformers", "accelerate", "torchao")
    found = {"wandistill": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    found |= {name: importlib.metadata.version(name) for name in packages}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


class RunRecord:
    """run.json of an output directory: the resolved configuration, teacher, student, versions and history.

    Args:
        output_dir: the run's directory.
        identity: the values that a continued run must share.
    """

    def __init__(self, output_dir: Path, identity: dict[str, Any]) -> None:
        self.path = output_dir / "run.json"
        self._identity = identity
        self._content: dict[str, Any] = {}

    def open(self, resume: str) -> bool:
        """Reads what is there; returns whether that run is finished already.

        Raises:
            ConfigError: another run's directory, one that cannot be read or written, or `never` where a run is.
        """
        directory = self.path.parent
        try:
            directory.mkdir(parents=True, exist_ok=True)
            content = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
            (directory / ".writable").touch()
            (directory / ".writable").unlink()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--output_dir {directory}: cannot be used ({error}); give another directory.") from error
        if content and resume == "never":
            raise ConfigError(f"--resume never: {directory} holds a run already; give another --output_dir.")
        known = content.get("identity", {})
        differences = [
            f"{name} is {known[name]!r} there and {value!r} here"
            for name, value in self._identity.items()
            if name in known and known[name] != value
        ]
        if differences:
            raise ConfigError(
                f"--output_dir {directory} holds another run: {'; '.join(differences)}. Give another --output_dir, or "
                "the same settings to continue that run."
            )
        self._content = content
        return content.get("state") == "finished"

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run; 0 before its first try has begun."""
        return int(self._content.get("steps", 0))

    def begin(self, world_size: int, **sections: Any) -> None:
        """Notes the start of a try; `sections` are further parts of run.json, such as teacher and student."""
        history = self._content.get("history", [])
        history.append({"started": time.time(), "world_size": world_size})
        self._content = {
            **self._content,  # what only the first try measured
            "schema": 1,
            "state": "running",
            "identity": self._identity,
            **sections,
            "versions": versions(),
            "history": history,
        }
        self._write()

    def update(self, **sections: Any) -> None:
        """Adds or replaces parts."""
        self._content.update(sections)
        self._write()

    def end_try(self, state: str, step: int) -> None:
        """Notes how the present try ended, after `step` steps."""
        self._content["state"] = state
        self._content["history"][-1] |= {"ended": time.time(), "step": step, "state": state}
        self._write()

    def _write(self) -> None:
        write_json(self.path, self._content)


class MetricsLog:
    """metrics.jsonl: one line per optimizer step.

    Lines after `step` are dropped at the start: a resumed run takes those steps again.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        if path.exists():
            kept = []
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line + "\n")
                except (ValueError, KeyError):
                    continue  # a line that a kill cut short
            partial = path.with_name(f".{path.name}.partial")
            partial.write_text("".join(kept), encoding="utf-8")
            os.replace(partial, path)
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - lives as long as the run

    def write(self, step: int, figures: dict[str, Any]) -> None:
        """Appends the figures of optimizer step `step` (from 1)."""
        try:
            self._file.write(json.dumps({"schema": 1, "step": step, **figures}) + "\n")
        except OSError as error:
            free = shutil.disk_usage(self._path.parent).free
            raise TrainingFailed(
                f"{self._path} could not be written ({error.strerror}; {free:,} bytes free there): make room and "
                "start the same command again; it goes on from the last checkpoint."
            ) from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
