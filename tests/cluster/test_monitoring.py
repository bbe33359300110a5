"""The chart on a real Prometheus: every panel has data, faults raise their alerts, a kill is remembered."""

import time
from typing import Any

import pytest

from tests.cluster.demo import Demo
from tests.cluster.faults import Killed, Replanned, Stopped, ended
from tests.cluster.monitoring import Monitoring, records
from tests.metrics.prometheus import OPTIONAL, panel_queries, rules, series_of

pytestmark = pytest.mark.cluster

# Seconds, longer than these tests take.
SESSION = 3600


def test_pods_of_a_run_are_scraped_by_the_chart_s_own_monitor(monitoring: Monitoring, demo: Demo):
    assert "Succeeded" in demo.wait()
    own = f'namespace="{demo.kubectl.namespace}", run="{demo.job}"'
    found = monitoring.prometheus.query(f"max by (pod, rank, endpoint) (last_over_time(wandistill_step{{{own}}}[1h]))")
    ranks = {(sample["metric"]["pod"], sample["metric"]["rank"]) for sample in found}
    master, worker = f"{demo.job}-master-0", f"{demo.job}-worker-0"
    assert ranks == {(master, "0"), (master, "1"), (worker, "2"), (worker, "3")}
    assert {sample["metric"]["endpoint"] for sample in found} == {"metrics"}


def test_stopped_rank_raises_its_alert_and_the_loss_that_is_not_finite_another(
    monitoring: Monitoring, stopped: Stopped
):
    own = f'alertstate="firing", namespace="{stopped.kubectl.namespace}", run="{stopped.job}"'
    (stalled,) = monitoring.prometheus.wait(f'ALERTS{{alertname="WandistillRankStalled", {own}}}', seconds=120)
    assert stalled["metric"]["rank"] == "0"

    stopped.go_on()

    assert "Failed" in stopped.kubectl.wait_for_end(stopped.job, seconds=120)
    assert ended(stopped.kubectl, stopped.job)["exitCode"] == 3
    monitoring.prometheus.wait(f'ALERTS{{alertname="WandistillLossNotFinite", {own}}}', seconds=60)


def test_one_kill_counts_one_and_names_its_replica_after_the_pod_and_the_exporter_are_gone(
    monitoring: Monitoring, demo: Demo, killed: Killed
):
    own = f'namespace="{killed.kubectl.namespace}", run="{killed.job}"'
    alert = f'ALERTS{{alertname="WandistillOutOfMemory", replica_type="master", replica_index="0", {own}}}'
    monitoring.prometheus.wait(f"last_over_time({alert}[1h])", seconds=60)
    before = monitoring.exporter_pod()

    killed.kubectl.run("delete", "pod", killed.pod)
    monitoring.by_annotations()
    after = monitoring.exporter_pod()
    assert after != before

    counter = f'wandistill_container_oom_killed_total{{job="by-annotations", pod="{after}", '
    (kill,) = monitoring.prometheus.wait(f"{counter}{own}}} > 0")
    assert kill["value"][1] == "1"
    assert (kill["metric"]["replica_type"], kill["metric"]["replica_index"]) == ("master", "0")
    # Of two releases with a run each, and one exporter.
    others = monitoring.prometheus.query(f'{counter}namespace="{demo.kubectl.namespace}"}}')
    assert others and {sample["value"][1] for sample in others} == {"0"}
    assert [event["reason"] for event in on_job(killed)].count("OutOfMemoryKill") == 1


def test_every_query_of_every_panel_and_rule_finds_data(
    monitoring: Monitoring, demo: Demo, killed: Killed, replanned: Replanned, stopped: Stopped
):
    """At some time: while a run went on, or after what happened to it."""
    now = time.time()
    asked = [(title, expr) for title, expr in panel_queries() if title not in OPTIONAL]
    asked += [(rule.get("alert") or rule["record"], expr) for rule in rules() for expr in series_of(rule["expr"])]
    empty = [
        (title, expr)
        for title, expr in asked
        # What a GPU tells is a recording's, if there is one that has it.
        if ("_gpu_" not in expr or "run_gpu_seconds" in expr or records())
        and not monitoring.prometheus.query_range(expr, now - SESSION, now, step=5)
    ]
    assert empty == []


def on_job(killed: Killed) -> list[dict[str, Any]]:
    """Events on the killed run's PyTorchJob."""
    return [event for event in killed.kubectl.items("events") if event["involvedObject"]["name"] == killed.job]
