"""A pod's endpoint in a test: what a rank may tell, and what is then scraped."""

from __future__ import annotations

import json
import os
import urllib.request
from dataclasses import asdict
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families as parse_text

from wandistill.metrics import snapshot
from wandistill.metrics.names import PARTS
from wandistill.metrics.steps import StepStatistics

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def scrape(port: int, accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


def samples(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parse_text(scrape(port)):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def figures(seconds: float = 0.2, loss: float = 1.0) -> dict[str, float]:
    return {"loss": loss, "lr": 1e-4, "grad_norm": 0.5, "samples": 4, **{f"{part}_seconds": seconds for part in PARTS}}


def steps(count: int = 3, total: int = 10) -> StepStatistics:
    statistics = StepStatistics(total)
    statistics.begin(0)
    for step in range(1, count + 1):
        statistics.add(step, figures(), "high")
    return statistics


def tell(folder: Path, rank: int = 0, pid: int | None = None, **more: list[snapshot.Sample]) -> snapshot.Snapshot:
    told = snapshot.mine(rank, rank, 1)
    if pid is not None:
        told.pid, told.pid_start = pid, snapshot.process_start(pid) or 1
    told.samples = {**steps().samples(), **more}
    assert snapshot.write(folder, told)
    return told


def overwrite(folder: Path, told: snapshot.Snapshot) -> None:
    """Writes a snapshot with the times that it has."""
    partial = folder / "partial"
    partial.write_text(json.dumps(asdict(told)))
    os.replace(partial, folder / f"rank-{told.rank}.json")
