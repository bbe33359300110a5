"""`make bench-metrics`: what a rank's snapshot and a scrape of eight ranks cost, and whether 2,000 scrapes leak.

For the scrapes eight processes write made-up snapshots of full size every second, and one endpoint serves them.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

from wandistill.metrics import snapshot
from wandistill.metrics.names import METRICS, Kind, Scope
from wandistill.metrics.pod import PodState, serve

RANKS, SCRAPES = 8, 2000
WARM_UP = 200


def write_snapshots(folder: str, rank: int) -> None:
    """A rank: writes a full snapshot every second until it is ended."""
    while True:
        _write(Path(folder), rank)
        time.sleep(1)


def main() -> None:
    """Prints the figures; ends with an error if memory or file descriptors grew."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        share = multiprocessing.Process(target=rank_share, args=(folder,))  # torch stays out of what is measured next
        share.start()
        share.join()
        ranks = [multiprocessing.Process(target=write_snapshots, args=(name, rank)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        endpoint = serve(PodState("bench", "local", 0), folder, 0)
        try:
            soak(endpoint.port)
        finally:
            endpoint.close()
            for rank in ranks:
                rank.kill()


def rank_share(folder: Path) -> None:
    """What a rank's own thread takes of its process while nothing else runs in it: torch is loaded, no GPU is there."""
    import torch

    from wandistill.train.distributed import World
    from wandistill.train.rank_snapshot import RankReporter

    held = torch.ones(1 << 28)  # 1 GiB, whose pages the kernel walks for the proportional share
    reporter = RankReporter(World(0, 1, 0, 1, torch.device("cpu")), folder, interval=0.1)
    reporter.begin_steps(0, 1000, 100)
    began, used = time.perf_counter(), time.process_time()
    with reporter:
        time.sleep(30)
    used, seconds = time.process_time() - used, time.perf_counter() - began
    count = seconds / 0.1
    print(
        f"a rank's snapshot takes {used / count * 1e3:.2f} ms of CPU, the walk over {held.nbytes / 2**30:.0f} GiB of "
        f"pages included: {used / count:.2%} of a core at one a second"
    )


def soak(port: int) -> None:
    """Scrapes again and again."""
    seconds, processor, size, early = [], [], 0, (0, 0)
    for scrape in range(SCRAPES):
        began, used = time.perf_counter(), time.process_time()
        size = len(urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read())
        seconds.append(time.perf_counter() - began)
        processor.append(time.process_time() - used)
        if scrape == WARM_UP:
            early = _held()
    late = _held()
    p99 = sorted(seconds)[int(0.99 * len(seconds))]
    print(
        f"a scrape of {RANKS} ranks ({size:,} bytes) takes {statistics.median(seconds) * 1e3:.1f} ms (99 %: "
        f"{p99 * 1e3:.1f} ms), {statistics.median(processor) * 1e3:.1f} ms of CPU, client included"
    )
    print(
        f"after {WARM_UP} and after {SCRAPES} scrapes: {early[0] / 2**20:.1f} and {late[0] / 2**20:.1f} MiB resident, "
        f"{early[1]} and {late[1]} file descriptors"
    )
    assert late[0] < early[0] + (4 << 20), "memory grows"
    assert late[1] <= early[1], "file descriptors are left open"


def _held() -> tuple[int, int]:
    """Resident bytes and open file descriptors of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def _write(folder: Path, rank: int) -> None:
    told = snapshot.mine(rank, rank, 0)
    for metric in METRICS.values():
        if metric.scope is Scope.RANK or (metric.scope is Scope.RUN and rank == 0):
            (label, values) = next(iter(metric.labels.items()), ("", ("",)))
            labels = [
                {name: "x" for name in metric.labels} | ({label: value} if label else {}) for value in values or ("x",)
            ]
            value = {"counts": [1] * 16, "sum": 1.5} if metric.kind is Kind.HISTOGRAM else 1.5
            told.samples[metric.name] = [(own, value) for own in labels]
    assert snapshot.write(folder, told)


if __name__ == "__main__":
    main()
