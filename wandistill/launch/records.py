"""What a rank leaves for its launcher: its process id, and how it ended. torchrun tells only that there was an end.

The launcher names a folder of its own in the environment; without one nothing is written.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

FOLDER = "WANDISTILL_LAUNCH_DIR"
COMMAND = "WANDISTILL_LAUNCH_COMMAND"  # what stands before the flags of `wandistill train`, as one text


@dataclass(frozen=True)
class ExitRecord:
    """How a rank ended, as it says itself; a rank that was killed leaves none."""

    rank: int
    code: int
    message: str = ""


@dataclass(frozen=True)
class Failure:
    """How torchrun saw a rank end."""

    code: int  # negative: the signal that killed it
    time: float  # seconds since the epoch


def folder() -> Path | None:
    """The launcher's folder for this rank's files."""
    value = os.environ.get(FOLDER)
    return Path(value) if value else None


def register() -> None:
    """Tells the launcher this rank's process id, so that it can signal the rank past torchrun."""
    write(f"pid-{_rank()}.json", {"pid": os.getpid()})


def leave(code: int, message: str = "") -> None:
    """Leaves the record of this rank's end; the first one stands, since what follows comes of it."""
    write(f"exit-{_rank()}.json", asdict(ExitRecord(_rank(), int(code), message)), replace=False)


def end_process(code: int) -> NoReturn:
    """Ends this process past the interpreter's own end, where C++ aborts if a thread comes back from it meanwhile: the
    one that waits for a peer's farewell does when that peer ends too."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave_failures(codes: Mapping[int, tuple[int, float]]) -> None:
    """Leaves what torchrun saw: exit code (negative: signal) and time of the ranks that failed."""
    write("failures.json", {str(rank): {"code": code, "time": when} for rank, (code, when) in codes.items()})


def write(name: str, content: dict[str, Any], *, replace: bool = True) -> None:
    """Writes a small JSON file into the launcher's folder, never to be seen half written."""
    where = folder()
    if where is None:
        return
    with suppress(OSError):  # the launcher is gone, or the disk full: neither is a reason to end otherwise
        descriptor, partial = tempfile.mkstemp(dir=where)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file)
            if replace:
                os.replace(partial, where / name)
            else:
                os.link(partial, where / name)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(partial)


def pids(where: Path) -> dict[int, int]:
    """Process id by rank, of those that have registered."""
    return {rank: content["pid"] for rank, content in read(where, "pid").items()}


def exits(where: Path) -> dict[int, ExitRecord]:
    """The records of the ranks that ended by themselves, by rank."""
    return {rank: ExitRecord(**content) for rank, content in read(where, "exit").items()}


def failures(where: Path) -> dict[int, Failure]:
    """What torchrun saw of the ranks that failed, by rank."""
    with suppress(OSError, ValueError):
        content = json.loads((where / "failures.json").read_text(encoding="utf-8"))
        return {int(rank): Failure(**failure) for rank, failure in content.items()}
    return {}


def read(where: Path, kind: str) -> dict[int, dict[str, Any]]:
    """What the files KIND-RANK.json hold, by rank."""
    found = {}
    for path in where.glob(f"{kind}-*.json"):
        with suppress(OSError, ValueError):
            found[int(path.stem.rsplit("-", 1)[1])] = json.loads(path.read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
