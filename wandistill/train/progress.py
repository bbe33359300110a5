"""How a long piece of work tells how far it is: a bar on a terminal, lines of JSON in a pod, plain lines elsewhere."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from wandistill.units import format_seconds

# Set in pods, whose lines `wandistill status` reads.
POD = "WANDISTILL_RUN"


class Progress:
    """Counts `total` pieces of work; `update` may add a text for people and figures for programs.

    Args:
        title: what is being done.
        total: pieces in all.
        start: pieces that are done already.
        enabled: False on ranks other than 0.
        every: seconds between lines.
    """

    def __init__(
        self,
        title: str,
        total: int,
        *,
        start: int = 0,
        enabled: bool = True,
        every: float = 10.0,
        stream: TextIO | None = None,
    ) -> None:
        self._title, self._total, self._start, self._done = title, total, start, start
        self._enabled, self._every = enabled, every
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._pod = POD in os.environ
        self._began = self._told = time.monotonic()
        self._width = 0

    def tell(self, done: int, total: int) -> None:
        """So many are done of so many, where both are found by looking; the pace counts from the first look."""
        if not self._total:
            self._start = self._done = done
        self._total = total
        self.update(done - self._done)

    def update(self, count: int = 1, text: str = "", figures: Callable[[], dict[str, float]] = dict) -> None:
        """`count` more pieces are done; `figures` is asked when a line is due."""
        self._done += count
        if not self._enabled:
            return
        now = time.monotonic()
        finished = self._done >= self._total
        if now - self._told < (0.1 if self._terminal else self._every) and not finished:
            return
        self._told = now
        if self._pod and not self._terminal:
            told = {"schema": 1, "progress": self._title, "done": self._done, "total": self._total}
            self._stream.write(json.dumps({**told, "seconds_left": self._seconds_left(now), **figures()}) + "\n")
            self._stream.flush()
            return
        line = f"{self._title} {self._done}/{self._total}{' ' + text if text else ''}, {self._left(now)}"
        if self._terminal:
            filled = int(24 * self._done / max(self._total, 1))
            line = f"[{'=' * filled}{' ' * (24 - filled)}] {line}"
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
            if finished:
                self._stream.write("\n")
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def _left(self, now: float) -> str:
        left = self._seconds_left(now)
        return f"{format_seconds(now - self._began)} taken" if left is None else f"{format_seconds(left)} left"

    def _seconds_left(self, now: float) -> float | None:
        """At the pace so far; None where there is none yet, or nothing is left."""
        done = self._done - self._start
        if self._done >= self._total or done == 0:
            return None
        return (now - self._began) / done * (self._total - self._done)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled and self._terminal and self._done < self._total:
            self._stream.write("\n")
