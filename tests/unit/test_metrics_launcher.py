"""`wandistill launch` serves its ranks' metrics, and what ended them stays readable."""

from __future__ import annotations

import socket
import urllib.request
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from wandistill.config import TrainConfig
from wandistill.errors import ExitCode
from wandistill.launch.ending import Ending
from wandistill.launch.metrics import FOLDER, PORT, LauncherMetrics, last_figures
from wandistill.metrics import snapshot


def config(tmp_path: Path, port: int) -> TrainConfig:
    return replace(TrainConfig(), output_dir=str(tmp_path / "my-run"), metrics_port=port)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def scrape(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_tries_replans_exit_code_and_out_of_memory_are_served_between_the_tries(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDISTILL_RUN", "job-a")
    monkeypatch.setenv("WANDISTILL_POOL", "a100")
    port = free_port()
    metrics = LauncherMetrics(config(tmp_path, port), 2)
    try:
        folder = Path(metrics.begin_try(0)[FOLDER])
        told = snapshot.mine(5, 1, 2)
        told.samples = {"wandistill_step": [({}, 7)]}
        assert snapshot.write(folder, told)
        found = scrape(port)
        assert found["wandistill_step"][0][0]["run"] == "job-a"
        assert sum(value for _, value in found["wandistill_oom_events_total"]) == 0
        assert "wandistill_pod_exit_code" not in found

        metrics.end_try(Ending(ExitCode.OUT_OF_MEMORY, "", 5), "cuda", "student")
        metrics.begin_try(1)
        found = scrape(port)
        pod = {"run": "job-a", "pool": "a100", "node_rank": "2"}
        assert found["wandistill_pod_exit_code"] == [(pod, 1)]
        assert found["wandistill_pod_restarts_total"] == [(pod, 1)]
        assert found["wandistill_pod_replans_total"] == [(pod, 1)]
        (event,) = [labels for labels, value in found["wandistill_oom_events_total"] if value]
        assert (event["kind"], event["rank"], event["phase"]) == ("cuda", "5", "train")
    finally:
        metrics.close()
    assert not folder.exists()


def test_without_a_port_nothing_is_served_and_ranks_write_nothing(tmp_path):
    metrics = LauncherMetrics(config(tmp_path, 0), 0)
    assert metrics.begin_try(0) == {}
    metrics.end_try(Ending(ExitCode.DONE, "done"))
    metrics.close()


def test_a_pod_s_port_is_taken_from_its_environment(tmp_path, monkeypatch):
    port = free_port()
    monkeypatch.setenv(PORT, str(port))
    metrics = LauncherMetrics(config(tmp_path, 0), 0)
    try:
        assert scrape(port)["wandistill_pod_restarts_total"][0][0]["run"] == "my-run"
    finally:
        metrics.close()


def test_the_last_whole_line_tells_the_last_step(tmp_path):
    assert last_figures(tmp_path) == {}
    lines = [f'{{"schema": 1, "step": {step}, "loss": {1 / step}, "lr": 1e-4}}' for step in range(1, 1001)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"schema": 1, "st')
    assert last_figures(tmp_path) == {"step": 1000, "loss": 0.001}
