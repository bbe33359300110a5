"""What a launcher keeps in the output directory, for the one that comes after it.

Where the kernel kills a whole container at once, as it does on managed clusters, the launcher dies with its ranks and
tells nothing. So it notes each try when it begins and ends, and the last memory of its ranks between; the next start
finds a try without an end, which most likely was killed for its memory.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from wandistill.errors import ConfigError

FOLDER = "launch"
REPLANS = "replans.json"
_CHECKPOINT = re.compile(r"^step-(\d+)$")


@dataclass(frozen=True)
class Try:
    """One try of a node's ranks."""

    number: int
    started: float
    step: int  # of the newest checkpoint when it began
    placement: str = ""
    phase: str = "start"
    limit: int | None = None  # bytes, of the node's memory
    ranks: list[dict[str, Any]] = field(default_factory=list)  # last memory of each
    question: dict[str, Any] | None = None  # what was planned
    ended: float | None = None
    code: int | None = None
    message: str = ""
    idle: int = 0  # tries in a row, this one counted, that left no new checkpoint and were not stopped by a signal

    def end(self, code: int, message: str) -> Try:
        """With its end."""
        return replace(self, ended=time.time(), code=code, message=message)


class StateFile:
    """The state of one node's tries.

    Args:
        output_dir: of the run, which all nodes share.
        node: number of this node.
    """

    def __init__(self, output_dir: Path, node: int) -> None:
        self._folder = output_dir / FOLDER
        self.path = self._folder / f"node-{node}.json"

    def last(self) -> Try | None:
        """The try before; None at the first start."""
        with suppress(OSError, ValueError, TypeError):
            content = json.loads(self.path.read_text(encoding="utf-8"))
            content.pop("schema")
            return Try(**content)
        return None

    def write(self, found: Try) -> None:
        """Notes the state of a try.

        Raises:
            ConfigError: the output directory cannot be written.
        """
        _write(self.path, {"schema": 1, **asdict(found)})


def newest_step(output_dir: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    with suppress(OSError):
        names = [_CHECKPOINT.match(path.name) for path in (output_dir / "checkpoints").iterdir()]
        return max((int(name.group(1)) for name in names if name), default=0)
    return 0


def all_steps_taken(output_dir: Path) -> bool:
    """Whether the last step's checkpoint is there, and only the export may be missing, or nothing."""
    with suppress(OSError, ValueError, KeyError):
        record = json.loads((output_dir / "run.json").read_text(encoding="utf-8"))
        return record.get("state") == "finished" or 0 < int(record["steps"]) <= newest_step(output_dir)
    return False


def replans(output_dir: Path) -> list[dict[str, Any]]:
    """The placements that launchers changed, the first one first."""
    with suppress(OSError, ValueError):
        content = json.loads((output_dir / FOLDER / REPLANS).read_text(encoding="utf-8"))
        found = content["replans"]
        assert isinstance(found, list)
        return found
    return []


def add_replan(output_dir: Path, asked: Mapping[str, object], changes: Mapping[str, object], why: str) -> None:
    """Notes a change of placement for all nodes to read.

    Args:
        asked: what the user's command says of the settings that may be changed; another command makes the change void.
    """
    entry = {"time": time.time(), "why": why, "asked": dict(asked), "changes": dict(changes)}
    _write(output_dir / FOLDER / REPLANS, {"schema": 1, "replans": [*replans(output_dir), entry]})


def replanned(output_dir: Path, asked: Mapping[str, object]) -> dict[str, object]:
    """The changes that hold for a command which asks for `asked`."""
    found: dict[str, object] = {}
    for entry in replans(output_dir):
        if entry["asked"] == dict(asked):
            found = entry["changes"]
    return found


def _write(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(f"--output_dir {path.parent.parent}: cannot be written ({error}); give another.") from error
