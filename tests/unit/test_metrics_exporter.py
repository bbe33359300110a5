"""The cluster exporter: every end of a container counts once, whoever dies in between."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from wandistill.metrics.exporter import leader as leader_module
from wandistill.metrics.exporter.api import Refused
from wandistill.metrics.exporter.exporter import Exporter
from wandistill.metrics.exporter.leader import Leadership
from wandistill.metrics.exporter.ledger import MOST_BYTES, MOST_RUNS, Ledger
from wandistill.metrics.names import CAUSES, METRICS, OOM_EXITS
from wandistill.metrics.pod import Endpoint

NOW = 1_800_000_000.0


def pod(run: str = "job-a", index: int = 0, *, kind: str = "worker", uid: str = "", gpus: int = 2) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"{run}-{kind}-{index}",
            "namespace": "ns",
            "uid": uid or f"uid-{run}-{kind}-{index}",
            "resourceVersion": "5",
            "labels": {
                "training.kubeflow.org/job-name": run,
                "training.kubeflow.org/replica-type": kind,
                "training.kubeflow.org/replica-index": str(index),
                "wandistill.dev/pool": "a100",
            },
            "ownerReferences": [
                {
                    "apiVersion": "kubeflow.org/v1",
                    "kind": "PyTorchJob",
                    "name": run,
                    "uid": "job-uid",
                    "controller": True,
                }
            ],
        },
        "spec": {"containers": [{"name": "pytorch", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]},
        "status": {
            "phase": "Running",
            "containerStatuses": [
                {"name": "sidecar", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}},
                {"name": "pytorch", "state": {"running": {"startedAt": "2027-01-15T07:00:00Z"}}, "restartCount": 0},
            ],
        },
    }


def ended(
    of: dict[str, Any],
    code: int,
    reason: str = "Error",
    *,
    message: str = "",
    container: str = "c1",
    place: str = "state",
) -> dict[str, Any]:
    of["status"]["containerStatuses"][1][place] = {
        "terminated": {
            "exitCode": code,
            "reason": reason,
            "message": message,
            "containerID": f"containerd://{container}",
            "startedAt": "2027-01-15T07:00:00Z",
            "finishedAt": "2027-01-15T08:00:00Z",
        }
    }
    return of


class FakeApi:
    """An API server in memory, which may be made to fail."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.changes: list[tuple[str, dict[str, Any]]] = []
        self.state, self.version = "", 0
        self.lease: dict[str, Any] | None = None
        self.events: dict[str, dict[str, Any]] = {}
        self.refuse: dict[str, int] = {}
        self.on_watch: Any = lambda: None

    def put(self, *pods: dict[str, Any]) -> None:
        for each in pods:
            self.pods[each["metadata"]["uid"]] = each
            self.changes.append(("MODIFIED", each))

    def delete(self, each: dict[str, Any]) -> None:
        del self.pods[each["metadata"]["uid"]]
        self.changes.append(("DELETED", each))

    def list_pods(self) -> tuple[list[dict[str, Any]], str]:
        self._refuse("list_pods")
        self.changes.clear()
        return list(self.pods.values()), "7"

    def watch_pods(self, version: str, seconds: int) -> Iterator[tuple[str, dict[str, Any]]]:
        self._refuse("watch_pods")
        while self.changes:
            yield self.changes.pop(0)
        yield "BOOKMARK", {"metadata": {"resourceVersion": "9"}}
        self.on_watch()

    def read_state(self) -> tuple[str, str]:
        return self.state, str(self.version) if self.version else ""

    def write_state(self, text: str, version: str) -> str:
        self._refuse("write_state")
        if version != (str(self.version) if self.version else ""):
            raise Refused(409, "conflict")
        self.state, self.version = text, self.version + 1
        return str(self.version)

    def read_lease(self) -> dict[str, Any] | None:
        return self.lease

    def write_lease(self, spec: dict[str, Any], version: str | None) -> None:
        if version != (self.lease["metadata"]["resourceVersion"] if self.lease else None):
            raise Refused(409, "conflict")
        self.lease = {"metadata": {"resourceVersion": str(int(version or 0) + 1)}, "spec": spec}

    def create_event(self, namespace: str, name: str, involved: Any, fields: dict[str, Any]) -> None:
        self._refuse("create_event")
        self.events.setdefault(name, {"namespace": namespace, "involved": dict(involved), **fields})

    def _refuse(self, call: str) -> None:
        if call in self.refuse:
            raise Refused(self.refuse[call], f"{call} is refused")


def work(api: FakeApi, identity: str = "one") -> Exporter:
    """An exporter that has listed, watched once, and stands."""
    exporter = Exporter(api, identity)
    once(api, exporter)
    return exporter


def once(api: FakeApi, exporter: Exporter) -> None:
    api.on_watch = exporter.stop
    exporter.work()
    exporter._stop.clear()


def values(exporter: Exporter, name: str) -> dict[tuple[str, ...], float]:
    """Samples of a metric by the values of its own labels, zeros left out."""
    own = METRICS[name].labels
    return {
        tuple(sample.labels[key] for key in ("run", *own) if key in sample.labels): sample.value
        for family in exporter.collect()
        for sample in family.samples
        if sample.name == name and sample.value
    }


def oom_kills(exporter: Exporter) -> dict[tuple[str, ...], float]:
    return values(exporter, "wandistill_container_oom_killed_total")


def test_an_oom_kill_counts_one_after_the_pod_is_gone_and_the_exporter_is_new():
    api = FakeApi()
    killed = pod(index=3)
    api.put(pod(kind="master"), killed)
    first = work(api)
    assert not oom_kills(first)
    api.put(ended(killed, 137, "OOMKilled"))
    api.put(killed)
    once(api, first)
    api.delete(killed)
    once(api, first)
    one = {("job-a", "worker", "3", "137"): 1}
    assert oom_kills(first) == one
    assert oom_kills(work(api)) == one
    # The pod is there again for a new exporter that lists, as when the deletion had waited for a finalizer.
    assert values(first, "wandistill_run_failures_total") == {("job-a", "oom"): 1}


def test_a_restart_of_the_exporter_between_the_kill_and_the_deletion_counts_it_once():
    api = FakeApi()
    killed = ended(pod(index=1), 137, "OOMKilled")
    api.put(killed)
    work(api)
    second = work(api)
    api.delete(killed)
    once(api, second)
    assert oom_kills(work(api)) == {("job-a", "worker", "1", "137"): 1}


def test_restarts_in_place_count_each_end_once_although_it_is_told_twice():
    api = FakeApi()
    restarted = ended(pod(), 137, "OOMKilled", container="c1")
    api.put(restarted)
    exporter = work(api)
    del restarted["status"]["containerStatuses"][1]["state"]["terminated"]
    ended(restarted, 137, "OOMKilled", container="c1", place="lastState")
    api.put(restarted)
    once(api, exporter)
    assert sum(oom_kills(exporter).values()) == 1
    api.put(ended(restarted, 137, "OOMKilled", container="c2"))
    once(api, exporter)
    assert sum(oom_kills(exporter).values()) == 2


def test_a_kill_inside_a_container_that_ended_well_is_told_apart_and_is_no_failure():
    api = FakeApi()
    api.put(
        ended(pod(index=0), 0, "OOMKilled"), ended(pod(index=1), 1, "OOMKilled"), ended(pod(index=2), 9, "OOMKilled")
    )
    exporter = work(api)
    assert oom_kills(exporter) == {
        ("job-a", "worker", "0", "0"): 1,
        ("job-a", "worker", "1", "1"): 1,
        ("job-a", "worker", "2", "other"): 1,
    }
    assert values(exporter, "wandistill_run_failures_total") == {("job-a", "oom"): 2}


def test_counters_are_there_at_zero_when_a_job_is_first_seen():
    api = FakeApi()
    api.put(pod())
    exporter = work(api)
    zeros = [
        (sample.name, sample.labels.get("exit_code") or sample.labels.get("cause"))
        for family in exporter.collect()
        for sample in family.samples
        if sample.name in ("wandistill_container_oom_killed_total", "wandistill_run_failures_total")
    ]
    assert zeros == [("wandistill_container_oom_killed_total", code) for code in OOM_EXITS] + [
        ("wandistill_run_failures_total", cause) for cause in CAUSES
    ]


@pytest.mark.parametrize(
    ("code", "text", "cause"),
    [
        (1, "", "oom"),
        (2, "", "config"),
        (3, "no such prompt", "training"),
        (3, "step 7: the loss is not finite", "nonfinite"),
        (70, "", "unexpected"),
        (130, "", "interrupted"),
        (137, "", "killed"),
        (138, "", "peer"),
        (143, "", "terminated"),
        (139, "", "other"),
    ],
)
def test_a_bad_end_has_its_cause(code, text, cause):
    api = FakeApi()
    api.put(ended(pod(), code, message=text))
    exporter = work(api)
    assert values(exporter, "wandistill_run_failures_total") == {("job-a", cause): 1}
    assert not oom_kills(exporter)


def test_the_last_values_of_an_ended_run_outlive_its_pods():
    api = FakeApi()
    master = pod(kind="master", gpus=4)
    api.put(master)
    exporter = work(api)
    master["status"]["phase"] = "Succeeded"
    del master["status"]["containerStatuses"][1]["state"]["running"]
    api.put(ended(master, 0, "Completed", message='noise\n{"schema": 1, "step": 500, "loss": 0.25}'))
    once(api, exporter)
    api.delete(master)
    once(api, exporter)
    later = work(api)
    assert values(later, "wandistill_run_last_step") == {("job-a",): 500}
    assert values(later, "wandistill_run_last_loss") == {("job-a",): 0.25}
    assert values(later, "wandistill_run_state") == {("job-a", "succeeded"): 1}
    assert values(later, "wandistill_run_gpu_seconds_total") == {("job-a",): 4 * 3600}
    assert not values(later, "wandistill_run_failures_total")


def test_a_kill_is_one_event_on_the_pytorchjob():
    api = FakeApi()
    killed = ended(pod(index=3), 137, "OOMKilled")
    api.put(killed)
    exporter = work(api)
    api.put(killed)
    once(api, exporter)
    (event,) = api.events.values()
    assert event["involved"] == {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "name": "job-a",
        "uid": "job-uid",
        "namespace": "ns",
    }
    assert event["reason"] == "OutOfMemoryKill" and event["type"] == "Warning"
    assert "worker-3" in event["message"] and "137" in event["message"]


def test_events_that_are_forbidden_stop_no_counting():
    api = FakeApi()
    api.refuse["create_event"] = 403
    api.put(ended(pod(), 137, "OOMKilled"))
    exporter = work(api)
    assert sum(oom_kills(exporter).values()) == 1
    assert values(exporter, "wandistill_exporter_errors_total") == {(): 1}


def test_memory_that_could_not_be_written_is_counted_by_the_next_exporter_and_told_then():
    api = FakeApi()
    api.put(ended(pod(), 137, "OOMKilled"))
    api.refuse["write_state"] = 500
    with pytest.raises(Refused):
        work(api)
    assert not api.events
    api.refuse.clear()
    assert sum(oom_kills(work(api, "one")).values()) == 1
    assert len(api.events) == 1


def test_a_version_that_is_too_old_is_listed_anew():
    api = FakeApi()
    api.put(pod())
    exporter = Exporter(api, "one")
    api.refuse["watch_pods"] = 410
    exporter.work()
    del api.refuse["watch_pods"]
    api.put(ended(pod(), 137, "OOMKilled"))
    once(api, exporter)
    assert sum(oom_kills(exporter).values()) == 1


def test_one_leads_and_the_other_serves_no_counts(monkeypatch):
    api = FakeApi()
    clock = [100.0]
    monkeypatch.setattr(leader_module.time, "monotonic", lambda: clock[0])
    one, two = Leadership(api, "one"), Leadership(api, "two")
    assert one.hold() and not two.hold()
    clock[0] += 20
    assert one.hold() and not two.hold()
    clock[0] += 29
    assert not two.hold()
    clock[0] += 2
    assert two.hold() and not one.hold()
    assert api.lease is not None and api.lease["spec"]["leaseTransitions"] == 1
    two.release()
    assert one.hold()

    waiting = Exporter(api, "three")
    waiting.stop()
    waiting.work()
    assert not values(waiting, "wandistill_exporter_leader") and not oom_kills(waiting)


def test_the_oldest_of_more_than_a_thousand_runs_are_dropped_and_the_memory_fits_a_configmap():
    ledger = Ledger()
    for number in range(MOST_RUNS + 100):
        ledger.update(ended(pod(f"job-{number}"), 137, "OOMKilled"), NOW + 600 * number)
        ledger.keep_only([], NOW + 600 * number)
    assert len(ledger) == MOST_RUNS
    text = ledger.to_json()
    assert len(text.encode()) <= MOST_BYTES
    kept = json.loads(text)["runs"]
    assert "ns/job-99" not in kept and f"ns/job-{MOST_RUNS + 99}" in kept


def test_a_job_of_a_thousand_replicas_still_fits_a_configmap():
    ledger = Ledger()
    for job in range(20):
        for index in range(1000):
            ledger.update(ended(pod(f"job-{job}", index), 137, "OOMKilled"), NOW + 600 * job)
    assert len(ledger.to_json().encode()) <= MOST_BYTES


def test_pods_of_other_things_are_no_runs():
    stranger = pod()
    del stranger["metadata"]["labels"]["training.kubeflow.org/job-name"]
    ledger = Ledger()
    assert ledger.update(stranger, NOW) == [] and len(ledger) == 0
    assert ledger.forget(stranger, NOW) == []


def test_a_clock_that_is_set_back_lets_no_counter_fall(monkeypatch):
    api = FakeApi()
    going, gone = pod(index=0), pod(index=1)
    api.put(going, gone)
    exporter = work(api)
    began = 1_799_996_400.0  # as the containers' startedAt says
    told = []
    for hours in (2, 1, 3):
        monkeypatch.setattr(time, "time", lambda hours=hours: began + 3600 * hours)
        if hours == 1:
            api.delete(gone)
            once(api, exporter)
        told.append(values(exporter, "wandistill_run_gpu_seconds_total")["job-a",])
    assert told == [2 * 2 * 7200, 2 * 2 * 7200, 2 * 7200 + 2 * 10800]


@pytest.mark.parametrize("name", ['a"b\\c\nd', "x" * 300, "ё{}=,#", "\udcff"])
def test_a_hostile_job_name_is_a_label_value_and_nothing_else(name):
    api = FakeApi()
    api.put(pod(name, kind="master"))
    endpoint = Endpoint(work(api), 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=60) as answer:
            families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    finally:
        endpoint.close()
    (run,) = {sample.labels["run"] for sample in families["wandistill_run_state"].samples}
    assert run == name.replace("\udcff", "?")
