"""The pod's endpoint: what ranks tell is served whole, and nothing hostile reaches Prometheus."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from wandistill.errors import ConfigError
from wandistill.metrics import snapshot
from wandistill.metrics.names import METRICS, PARTS, PHASES, Scope, series_names
from wandistill.metrics.pod import PodState, serve
from wandistill.metrics.steps import StepStatistics

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[tuple[PodState, Path, int]]:
    state = PodState("job-a", "pool-a", 1)
    folder = tmp_path / "snapshots"
    folder.mkdir()
    endpoint = serve(state, folder, 0)
    yield state, folder, endpoint.port
    endpoint.close()


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


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_each_rank_s_samples_carry_run_pool_and_rank_in_both_formats(pod):
    _, folder, port = pod
    tell(folder, 0)
    tell(folder, 5)
    found = samples(port)
    assert found["wandistill_step"] == [
        ({"run": "job-a", "pool": "pool-a", "rank": str(rank), "local_rank": str(rank), "node_rank": "1"}, 3)
        for rank in (0, 5)
    ]
    text = scrape(port, OPENMETRICS)
    assert text.endswith("# EOF\n")
    families = {family.name: family for family in parse_openmetrics(text)}
    histogram = families["wandistill_step_seconds"]
    assert histogram.type == "histogram" and histogram.unit == "seconds"
    bucket = {
        sample.labels["le"]: sample.value
        for sample in histogram.samples
        if sample.name.endswith("_bucket") and sample.labels["part"] == "step" and sample.labels["rank"] == "0"
    }
    assert bucket["0.1"] == 0 and bucket["0.25"] == 3 and bucket["+Inf"] == 3
    assert families["wandistill_samples"].type == "counter"


def test_what_is_served_is_in_the_table_with_its_labels(pod):
    state, folder, port = pod
    state.exit_code = 1
    tell(folder, 0)
    for name, entries in samples(port).items():
        # prometheus_client writes no _created series for families of a collector's own.
        assert name in series_names(), name
        metric = METRICS[re.sub(r"(?<=seconds)_(bucket|sum|count)$", "", name)]
        assert all(set(labels) - {"le"} == set(metric.label_names) for labels, _ in entries), name


def test_the_first_out_of_memory_raises_a_series_that_was_there_at_zero(pod):
    state, folder, port = pod
    tell(folder, 3)
    first = samples(port)["wandistill_oom_events_total"]
    assert len(first) == 4 * len(PHASES) and all(value == 0 for _, value in first)
    state.count_oom("cuda", 3, "train")
    second = samples(port)["wandistill_oom_events_total"]
    assert [labels for labels, _ in second] == [labels for labels, _ in first]
    (event,) = [labels for labels, value in second if value == 1]
    assert (event["kind"], event["rank"], event["phase"]) == ("cuda", "3", "train")
    with pytest.raises(ValueError, match="out-of-memory"):
        state.count_oom("gpu", 3, "train")


def test_a_dead_rank_s_series_vanish_and_its_out_of_memory_stays(pod, other):
    state, folder, port = pod
    tell(folder, 0)
    tell(folder, 1, other.pid)
    state.count_oom("cgroup", 1, "train")
    assert {labels["rank"] for labels, _ in samples(port)["wandistill_loss"]} == {"0", "1"}
    other.kill()
    time.sleep(0.05)  # a zombie until somebody waits for it
    found = samples(port)
    assert {labels["rank"] for labels, _ in found["wandistill_loss"]} == {"0"}
    assert sum(value for _, value in found["wandistill_oom_events_total"]) == 1
    assert [path.name for path in folder.iterdir()] == ["rank-0.json"]


def test_a_stopped_rank_keeps_only_what_stays_true(pod, other):
    _, folder, port = pod
    other.send_signal(signal.SIGSTOP)
    told = tell(folder, 0, other.pid)
    told.monotonic -= 31
    _overwrite(folder, told)
    found = samples(port)
    assert found["wandistill_step"][0][1] == 3 and found["wandistill_rank_snapshot_age_seconds"][0][1] > 30
    assert "wandistill_rank_last_step_timestamp_seconds" in found
    assert "wandistill_loss" not in found and "wandistill_step_seconds_bucket" not in found


def test_a_clock_that_jumps_moves_no_age_and_no_last_step(pod):
    _, folder, port = pod
    for jump in (3600.0, -3600.0):
        told = tell(folder, 0)
        # As if the snapshot had been written before the wall clock was set.
        told.wall -= jump
        told.samples["wandistill_rank_last_step_timestamp_seconds"] = [({}, told.wall - 7)]
        _overwrite(folder, told)
        found = samples(port)
        assert found["wandistill_rank_snapshot_age_seconds"][0][1] < 5
        since = time.time() - found["wandistill_rank_last_step_timestamp_seconds"][0][1]
        assert 6 < since < 12


@pytest.mark.parametrize("name", ['a"b\\c\nd', "x" * 300, "ё{}=,#", ""])
def test_a_hostile_run_name_is_a_label_value_and_nothing_else(name, tmp_path):
    endpoint = serve(PodState(name, 'p"\n', 0), tmp_path, 0)
    try:
        tell(tmp_path, 0)
        assert samples(endpoint.port)["wandistill_step"][0][0]["run"] == name
        (step,) = [f for f in parse_openmetrics(scrape(endpoint.port, OPENMETRICS)) if f.name == "wandistill_step"]
        assert step.samples[0].labels["run"] == name
    finally:
        endpoint.close()


def test_half_files_foreign_files_and_lying_snapshots_cost_their_own_samples_only(pod):
    _, folder, port = pod
    good = tell(folder, 0)
    whole = (folder / "rank-0.json").read_text()
    (folder / "rank-1.json").write_text(whole[: len(whole) // 2])
    (folder / "rank-2.json").write_bytes(b"\xff\xfe\x00")
    (folder / "rank-3.json").write_text("[]")
    (folder / "rank-4.json").write_text(" " * (1 << 20))
    (folder / "rank-5.json").mkdir()
    (folder / "notes.txt").write_text("hello")
    good.rank = 6
    good.samples |= {
        "wandistill_loss": [({}, float("nan"))],
        "wandistill_no_such": [({}, 1)],
        "wandistill_rank_phase": [({"phase": "lunch"}, 1)],
        "wandistill_learning_rate": [({"extra": "label"}, 1)],
        "wandistill_gradient_norm": [({}, "much")],
        "wandistill_step_seconds": [({"part": "step"}, {"counts": [1], "sum": 1})],
        "wandistill_pod_exit_code": "no list",
        "wandistill_rank_snapshot_age_seconds": [({}, 7)],
    }
    assert snapshot.write(folder, good)
    found = samples(port)
    assert {labels["rank"] for labels, _ in found["wandistill_step"]} == {"0", "6"}
    assert len(found["wandistill_rank_snapshot_age_seconds"]) == 2
    assert {labels["rank"] for labels, _ in found["wandistill_gradient_norm"]} == {"0"}
    assert {labels["phase"] for labels, _ in found.get("wandistill_rank_phase", [])} <= set(PHASES)
    assert {labels["rank"] for labels, _ in found["wandistill_step_seconds_count"]} == {"0"}
    assert set(found) <= series_names()


def test_a_thousand_short_lived_ranks_leave_no_series_and_no_file(pod):
    _, folder, port = pod
    tell(folder, 0)
    before = scrape(port).count("\n")
    dead = tell(folder, 1)
    dead.pid_start = -1
    text = json.dumps(asdict(dead))
    for rank in range(1, 1001):
        (folder / f"rank-{rank}.json").write_text(text)
    tell(folder, 0)
    assert scrape(port).count("\n") == before
    assert len(list(folder.iterdir())) == 1


def test_a_full_disk_keeps_the_former_snapshot_whole(tmp_path, monkeypatch):
    told = tell(tmp_path, 0)
    before = (tmp_path / "rank-0.json").read_bytes()

    def full(self: Path, text: str, **_: object) -> int:
        with open(self, "w") as file:
            file.write(text[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert not snapshot.write(tmp_path, told)
    assert (tmp_path / "rank-0.json").read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    assert not snapshot.write(tmp_path / "nowhere", told)


def test_scrapes_during_a_rank_s_writes_and_deaths_see_whole_lines(pod):
    _, folder, port = pod
    stop = threading.Event()

    def churn() -> None:
        told = snapshot.mine(0, 0, 1)
        told.samples = steps().samples()
        while not stop.is_set():
            snapshot.write(folder, told)
            told.pid_start = -told.pid_start  # dead every other time

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(30):
            for family in parse_openmetrics(scrape(port, OPENMETRICS)):
                assert family.samples
    finally:
        stop.set()
        thread.join()


def test_a_port_that_is_taken_is_a_sentence(pod, tmp_path):
    _, _, port = pod
    with pytest.raises(ConfigError, match=rf"--metrics_port {port}: cannot be listened on"):
        serve(PodState("a", "b", 0), tmp_path, port)


def test_names_have_one_prefix_base_units_and_the_suffix_of_their_kind():
    for name, metric in METRICS.items():
        assert re.fullmatch(r"wandistill(_[a-z]+)+", name) and metric.help and not metric.help.endswith(".")
        assert name.endswith("_total") == (metric.kind.value == "counter")
        assert name.endswith("_info") == (metric.kind.value == "info")
        if metric.unit:
            assert metric.family.endswith(f"_{metric.unit}")
        assert metric.scope in (Scope.EXPORTER,) or "run" in metric.label_names


def test_steps_tell_progress_pace_and_end():
    statistics = steps(count=4, total=16)
    run = statistics.run_samples()
    assert run["wandistill_progress_ratio"] == [({}, 0.25)]
    assert abs(run["wandistill_predicted_end_timestamp_seconds"][0][1] - time.time()) < 5
    statistics.add(5, figures(loss=float("nan")) | {"grad_norm": float("inf")}, "low")
    found = statistics.samples()
    assert found["wandistill_rank_nonfinite_total"] == [({}, 1)] and found["wandistill_samples_total"] == [({}, 20)]
    assert found["wandistill_rank_expert"] == [({"expert": "high"}, 0), ({"expert": "low"}, 1)]
    json.dumps(found)


def _overwrite(folder: Path, told: snapshot.Snapshot) -> None:
    """Writes a snapshot with the times that it has."""
    partial = folder / "partial"
    partial.write_text(json.dumps(asdict(told)))
    os.replace(partial, folder / f"rank-{told.rank}.json")
