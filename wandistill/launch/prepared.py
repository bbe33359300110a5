"""The mark that a `wandistill prepare` leaves for the runs that wait for it. No torch: launchers look for it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from wandistill.config import TrainConfig
from wandistill.errors import ConfigError, Terminated

# Seconds that a pod's launcher waits for the mark; without it none does.
WAIT = "WANDISTILL_PREPARE_WAIT"
WAITING = "waiting for prepare, seconds"
# Tries of the job that prepares, after which none is to be hoped for; the hub may be out of reach for a while.
TRIES = 4
# What the teacher's folder and the prompts' embeddings depend on.
_INPUTS = (
    "teacher_path",
    "teacher_revision",
    "teacher_dtype",
    "data_path",
    "data_column",
    "negative_prompt",
    "sample_prompts",
)
_LOOK, _TELL = 2.0, 30.0
# An error that was there before may be one of long ago, and a new try on its way.
_OLD_SECONDS = 120.0


def mark_path(config: TrainConfig) -> Path:
    """Where the mark of these settings is, beside the caches; other settings or other prompts have another."""
    inputs = {name: getattr(config, name) for name in _INPUTS}
    for name in ("data_path", "sample_prompts"):
        path = Path(inputs[name])
        if inputs[name] and path.is_file():
            inputs[f"{name} content"] = hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    return config.cache_path / f"prepared-{digest}.json"


@contextmanager
def marked(config: TrainConfig) -> Iterator[None]:
    """Leaves the mark when the body is through; else, where the settings may be to blame, the error and its number."""
    path = mark_path(config)
    tries = int(_read(path).get("tries", 0)) % TRIES
    try:
        yield
    except ConfigError as error:
        with suppress(OSError):
            _write(path, {"error": str(error), "tries": tries + 1})
        raise
    _write(path, {"error": "", "tries": tries + 1})


def wait(config: TrainConfig, seconds: int) -> None:
    """Returns when the mark is there.

    Raises:
        ConfigError: what was to leave it failed `TRIES` times, or it is not there after so many seconds.
        Terminated: SIGTERM came first.
    """
    path, began, told = mark_path(config), time.monotonic(), -_TELL
    before = _read(path)

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated("stopped while it waited for wandistill prepare; nothing was begun.")

    former = signal.signal(signal.SIGTERM, stop)
    try:
        while (found := _read(path)).get("error", "none"):
            waited = time.monotonic() - began
            new = found != before or waited >= _OLD_SECONDS
            if found and new and found["tries"] >= TRIES:
                raise ConfigError(f"wandistill prepare failed {TRIES} times, the last one with: {found['error']}")
            if waited >= seconds:
                raise ConfigError(_missing(config, path, seconds))
            if waited - told >= _TELL:
                told = waited
                line = {"schema": 1, "progress": WAITING, "done": int(waited), "total": seconds}
                print(json.dumps(line), file=sys.stderr, flush=True)
            time.sleep(_LOOK)
    finally:
        signal.signal(signal.SIGTERM, former)


def _missing(config: TrainConfig, path: Path, seconds: int) -> str:
    run = os.environ.get("WANDISTILL_RUN", "")
    job = f"'kubectl logs job/{run}-prepare' says why; " if run else ""
    return (
        f"the caches that wandistill prepare fills are not there after {seconds} s ({path} is missing): {job}"
        "'wandistill prepare --only embeddings' with the settings of this run fills them, and without prepare.enabled "
        f"the run does, in --cache_dir {config.cache_path}."
    )


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) and {"error", "tries"} <= set(found) else {}
    return {}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"schema": 1, "time": time.time(), **content}) + "\n", encoding="utf-8")
    os.replace(partial, path)
