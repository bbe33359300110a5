"""The pod's endpoint: what ranks tell is served whole, and nothing hostile reaches Prometheus."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from pod_endpoint import OPENMETRICS, figures, overwrite, samples, scrape, steps, tell
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from wandistill.errors import ConfigError
from wandistill.metrics.names import METRICS, PHASES, Scope, series_names
from wandistill.metrics.pod import PodState, serve


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
    overwrite(folder, told)
    found = samples(port)
    assert found["wandistill_step"][0][1] == 3 and found["wandistill_rank_snapshot_age_seconds"][0][1] > 30
    assert "wandistill_rank_last_step_timestamp_seconds" in found
    assert "wandistill_loss" not in found and "wandistill_step_seconds_bucket" not in found


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
