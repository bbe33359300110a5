"""Stands for torchrun and its ranks, without torch: `fake_agent.py [torchrun's flags] PROGRAM [flags]`.

Like torchrun it starts every rank in a session of its own, ends all when one fails, and returns 1 for everything.
PROGRAM is a Python file that each rank runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from wandistill.launch import records


def main(arguments: list[str]) -> int:
    ranks = int(next(text for text in arguments if text.startswith("--nproc_per_node=")).split("=")[1])
    number = int(next((text for text in arguments if text.startswith("--node_rank=")), "=0").split("=")[1])
    first = int(os.environ.get("FAKE_FIRST_RANK", number * ranks))  # nodes may have unlike numbers of ranks
    program = [text for text in arguments if not text.startswith("--n") and text != "--standalone"]
    program = [text for text in program if not text.startswith("--master")]
    running = {
        first + local: subprocess.Popen(
            [sys.executable, *program],
            env={**os.environ, "RANK": str(first + local), "LOCAL_RANK": str(local)},
            start_new_session=True,
        )
        for local in range(ranks)
    }
    failed: dict[int, tuple[int, float]] = {}
    while running and not failed:
        time.sleep(0.02)
        for rank, process in list(running.items()):
            if process.poll() is not None:
                running.pop(rank)
                if process.returncode:
                    failed[rank] = (process.returncode, time.time())
    for process in running.values():
        process.send_signal(signal.SIGTERM)
    for rank, process in running.items():
        if process.wait():
            failed[rank] = (process.returncode, time.time())
    if failed:
        records.leave_failures(failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
