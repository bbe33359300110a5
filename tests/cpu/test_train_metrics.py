"""`wandistill train --metrics_port`: what a rank tells while it trains, and that it is true."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from runs import SHORT, flags, here

from wandistill.demo.captions import training_prompts
from wandistill.errors import ExitCode
from wandistill.metrics.names import METRICS, PARTS, PHASES, Scope
from wandistill.train import rank_snapshot
from wandistill.train.distributed import World
from wandistill.train.rank_memory import HostMemory
from wandistill.train.rank_snapshot import RankReporter

Samples = dict[str, list[tuple[dict[str, str], float]]]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def scrape(port: int) -> Samples:
    found: Samples = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def of(found: Samples, name: str, **labels: str) -> list[float]:
    return [value for own, value in found.get(name, ()) if labels.items() <= own.items()]


def test_a_run_tells_its_steps_phases_and_memory_while_it_lasts(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_snapshot, "INTERVAL", 0.05)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(training_prompts(4)))
    port, out = free_port(), tmp_path / "out"
    settings = {**SHORT, "data_path": prompts, "rollout_steps": 2, "batch_size": 1, "output_dir": out}
    settings |= {"max_steps": 12, "checkpoint_interval": 5, "metrics_port": port}
    scrapes: list[Samples] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            with contextlib.suppress(OSError):  # not served yet, or no more
                scrapes.append(scrape(port))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert here(["train", *flags(settings)]) == 0
    finally:
        ended.set()
        watcher.join()

    lines = {line["step"]: line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())}
    phases = [entry for found in scrapes for entry in found.get("wandistill_rank_phase", ())]
    seen = {own["phase"] for own, on in phases if on}
    assert "train" in seen and seen <= set(PHASES)
    found = [found for found in scrapes if of(found, "wandistill_checkpoint_bytes")][-1]
    (step,) = of(found, "wandistill_step")
    assert of(found, "wandistill_loss") == [lines[step]["loss"]]
    assert of(found, "wandistill_learning_rate") == [lines[step]["lr"]]
    assert of(found, "wandistill_samples_total") == [step]
    for part in PARTS:
        assert of(found, "wandistill_step_seconds_count", part=part) == [step]
        told = sum(lines[number][f"{part}_seconds"] for number in range(1, int(step) + 1))
        assert abs(of(found, "wandistill_step_seconds_sum", part=part)[0] - told) < 1e-6
    sizes = [_size(folder) for folder in (out / "checkpoints").iterdir()]
    assert abs(of(found, "wandistill_checkpoint_bytes")[0] - sizes[0]) < 0.01 * sizes[0]
    assert sum(of(found, "wandistill_rank_phase")) == 1
    assert of(found, "wandistill_progress_ratio") == [step / 12]
    assert found["wandistill_placement_info"][0][0]["asked"] == "auto"
    assert {own["run"] for own, _ in found["wandistill_step"]} == {"out"}
    # A rank without a GPU tells nothing of one.
    assert not [name for name in found if "gpu" in name]
    served = {name for name, metric in METRICS.items() if metric.scope in (Scope.RANK, Scope.RUN) and "gpu" not in name}
    assert served <= {name.removesuffix("_count") for name in found}
    with pytest.raises(OSError):
        scrape(port)


def _size(folder: Path) -> int:
    return sum(json.loads((folder / "manifest.json").read_text())["files"].values())


def test_resident_and_shared_bytes_are_the_kernel_s():
    told = {labels["kind"]: size for labels, size in HostMemory().samples()["wandistill_rank_host_memory_bytes"]}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert abs(told["rss"] - pages * os.sysconf("SC_PAGE_SIZE")) < 0.01 * told["rss"]
    assert told["pinned"] == 0 and 0 < told["pss"] <= 1.01 * told["rss"]


def test_a_reporter_without_a_folder_writes_nothing_and_an_error_leaves_its_phase(tmp_path):
    world = World(0, 1, 0, 1, torch.device("cpu"))
    with RankReporter(world, None) as reporter:
        with reporter.during("train"):
            with reporter.during("checkpoint"):
                assert reporter.phase == "checkpoint"
            assert reporter.phase == "train"
        try:
            with reporter.during("load"):
                raise MemoryError
        except MemoryError:
            pass
        assert reporter.phase == "load"
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_ends_the_run_before_it_loads_anything(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        settings = {**SHORT, "output_dir": tmp_path / "out", "metrics_port": taken.getsockname()[1]}
        assert here(["train", *flags(settings)]) == ExitCode.BAD_CONFIG
    assert "--metrics_port" in capsys.readouterr().err
