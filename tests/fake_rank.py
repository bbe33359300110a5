"""Stands for a rank of `wandistill train`, without torch; its behaviour is a piece of Python in FAKE_RANK.

The piece sees what is defined and imported here.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from wandistill.launch import records
from wandistill.launch.memory import RankMemory, limit_bytes

rank = int(os.environ["RANK"])
output_dir = Path(sys.argv[sys.argv.index("--output_dir") + 1])


def leave(code: int, message: str = "") -> None:
    """Ends as a rank does."""
    records.leave(code, message)
    sys.stdout.flush()
    os._exit(code)


def tell(phase: str = "student", **memory: int) -> None:
    """Tells the launcher this rank's memory."""
    records.write(f"memory-{rank}.json", RankMemory(rank, phase, 1 << 30, limit_bytes(), **memory).to_json())


def meet(ranks: int) -> None:
    """Waits until so many ranks have told their memory."""
    where = records.folder()
    assert where is not None
    while len(records.read(where, "memory")) < ranks:
        time.sleep(0.02)


def ended(other: int) -> None:
    """Waits for the end of another rank."""
    where = records.folder()
    assert where is not None
    while other not in records.exits(where):
        time.sleep(0.02)


def on_signal(number: int, act: object) -> None:
    """Calls `act` when a signal comes."""
    signal.signal(number, lambda number, frame: act())  # type: ignore[operator]


records.register()
exec(os.environ["FAKE_RANK"], globals())
