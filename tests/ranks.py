"""The ranks of a `wandistill train` world as forked processes: they share one import of torch and diffusers, which
would otherwise take longer than their run."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["wandistill.cli", "wandistill.train.run"])


class Ranks:
    """Starts `count` gloo ranks of `wandistill train` with the environment that torchrun would give them.

    Args:
        count: the world's size.
        arguments: flags of `wandistill train`.
        log: a file that takes what all ranks print.
        before: called in each rank, with its number, before the run.
    """

    def __init__(
        self, count: int, arguments: list[str], log: Path, before: Callable[[int], None] | None = None
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        world = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.log = log
        self.processes = [
            _CONTEXT.Process(target=_rank, args=({**world, "RANK": rank, "LOCAL_RANK": rank}, arguments, log, before))
            for rank in range(count)
        ]
        for process in self.processes:
            process.start()

    def finish(self, seconds: float = 300) -> str:
        """Waits for the end and returns what was printed; anything but exit code 0 of every rank fails the test."""
        codes = self.wait(seconds)
        assert codes == [0] * len(codes), (codes, self.log.read_text()[-3000:])
        return self.log.read_text()

    def wait(self, seconds: float = 300) -> list[int | None]:
        """Waits for the end of all ranks and returns their exit codes; None for one that is killed since it is late."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        return codes

    def kill(self) -> None:
        """Kills all ranks with SIGKILL."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def wait_for(self, path: Path, seconds: float = 240) -> None:
        """Waits until `path` exists."""
        end = time.monotonic() + seconds
        while not path.exists():
            ended = [process.exitcode for process in self.processes if process.exitcode is not None]
            assert not ended, f"a rank ended before {path.name} with {ended}: {self.log.read_text()[-3000:]}"
            assert time.monotonic() < end, f"{path} did not appear within {seconds} s"
            time.sleep(0.01)


def _rank(
    environment: dict[str, object], arguments: list[str], log: Path, before: Callable[[int], None] | None
) -> None:
    from wandistill.cli import main

    os.environ.update({name: str(value) for name, value in environment.items()})
    sys.argv = ["wandistill.train", *arguments]
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if before is not None:
        before(int(os.environ["RANK"]))
    sys.exit(main(["train", *arguments]))
