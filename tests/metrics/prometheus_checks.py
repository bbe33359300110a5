"""A real Prometheus scrapes a pod's endpoint and an exporter's; every panel's query finds data: `make test-metrics`.

The ranks are this process, which tells every metric of the table with made-up values, those of GPUs too; the exporter
has an API server in memory. What a run really tells is tested in tests/cpu/test_train_metrics.py.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.metrics.prometheus import OPTIONAL, ROOT, RULES, Prometheus, panel_queries
from tests.tools.build import tool
from wandistill.metrics import snapshot
from wandistill.metrics.exporter.exporter import Exporter
from wandistill.metrics.names import METRICS, Kind, Scope
from wandistill.metrics.pod import Endpoint, PodState, serve

sys.path.insert(0, str(ROOT / "tests" / "unit"))

from test_metrics_exporter import FakeApi, ended, pod


class Ranks:
    """Two ranks that tell every metric, each second."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count, self._stop = folder, 0, threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while True:
            self._count += 1
            for rank in (0, 1):
                assert snapshot.write(self._folder, self._told(rank))
            if self._stop.wait(0.5):
                return

    def _told(self, rank: int) -> snapshot.Snapshot:
        told = snapshot.mine(rank, rank, 0)
        for metric in METRICS.values():
            if metric.scope is Scope.RANK or (metric.scope is Scope.RUN and rank == 0):
                value: Any = self._count
                if metric.name == "wandistill_rank_phase":
                    value = 1
                if metric.name.endswith("timestamp_seconds"):
                    value = time.time()
                if metric.kind is Kind.HISTOGRAM:
                    value = {"counts": [self._count] * 16, "sum": 9.5 * self._count}
                (label, values) = next(iter(metric.labels.items()), ("", ("",)))
                others = {name: "x" for name in metric.labels}
                told.samples[metric.name] = [({**others, label: v} if label else {}, value) for v in values or ("x",)]
        return told


def start(folder: Path, targets: dict[str, int]) -> tuple[subprocess.Popen[bytes], Prometheus]:
    """A server of its own on a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": name,
                "honor_labels": True,
                "static_configs": [{"targets": [f"127.0.0.1:{target}"], "labels": {"namespace": "ns"}}],
            }
            for name, target in targets.items()
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = [
        str(tool("prometheus")),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    return process, Prometheus(f"http://127.0.0.1:{port}")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    snapshots = tmp_path_factory.mktemp("snapshots")
    ranks = Ranks(snapshots)
    state = PodState("job-a", "a100", 0, exit_code=1)
    pod_endpoint = serve(state, snapshots, 0)
    api = FakeApi()
    killed = pod()
    api.put(killed, pod(kind="master"))
    exporter = Exporter(api, "one")
    exporter_endpoint = Endpoint(exporter, 0)
    thread = threading.Thread(target=exporter.run)
    thread.start()
    process, server = start(folder, {"pods": pod_endpoint.port, "exporter": exporter_endpoint.port})
    try:
        server.wait('wandistill_oom_events_total{rank="1"} == 0')
        server.wait("wandistill_container_oom_killed_total == 0")
        state.count_oom("cuda", 1, "train")
        message = '{"schema": 1, "step": 12, "loss": 0.5}'
        api.put(ended(killed, 137, "OOMKilled", message=message))
        server.wait("wandistill_container_oom_killed_total == 1")
        server.wait('wandistill_oom_events_total{rank="1"} == 1')
        server.wait("count_over_time(wandistill_step[1m]) > 3")
        yield server
    finally:
        exporter.stop()
        process.terminate()
        process.wait(timeout=30)
        for endpoint in (pod_endpoint, exporter_endpoint):
            endpoint.close()
        ranks.close()
        thread.join()


def test_both_are_scraped_without_an_error(prometheus):
    assert {sample["metric"]["job"] for sample in prometheus.wait("up == 1")} == {"pods", "exporter"}


def test_every_query_of_every_panel_finds_data(prometheus):
    asked = ((title, expr) for title, expr in panel_queries() if title not in OPTIONAL)
    assert [(title, expr) for title, expr in asked if not prometheus.query(expr)] == []


def test_the_first_out_of_memory_of_a_fresh_run_raises_its_alert(prometheus):
    alerts = prometheus.wait('ALERTS{alertname="WandistillOutOfMemory", alertstate="firing"}')
    assert {"cuda"} == {alert["metric"]["kind"] for alert in alerts if "kind" in alert["metric"]}
    found = prometheus.wait('ALERTS{alertname="WandistillOutOfMemory", replica_type="worker"}')
    assert found[0]["metric"]["run"] == "job-a" and found[0]["metric"]["replica_index"] == "0"


def test_the_exporter_s_series_keep_the_namespace_of_their_run(prometheus):
    assert {sample["metric"]["namespace"] for sample in prometheus.query("wandistill_run_state")} == {"ns"}
