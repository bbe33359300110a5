"""What the cluster exporter remembers of runs: counts and last values, small enough for one ConfigMap.

Every end of a container is counted once: its key is kept as long as its pod exists, since a pod that is gone can tell
nothing again. So a new exporter with the same memory counts on where the former stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from wandistill.metrics.exporter.terminations import Replica, Termination, gpu_run, replica_of, terminations
from wandistill.metrics.names import CAUSES, OOM_EXITS, STATES

MOST_RUNS = 1000
# How finely it is remembered when a run was seen: each change is a write of the ConfigMap.
_SEEN_SECONDS = 600
# A ConfigMap holds 1 MiB; its other fields and the API's own copy of them take some.
MOST_BYTES = 900_000

Event = tuple[Replica, Termination, Mapping[str, Any]]  # with the reference of the job's object


class Ledger:
    """Runs by namespace and name; see `to_json` for what is remembered."""

    def __init__(self, remembered: str = "") -> None:
        content = json.loads(remembered) if remembered else {}
        self._runs: dict[str, dict[str, Any]] = content.get("runs", {})
        self._pods: dict[str, Mapping[str, Any]] = {}  # by uid; those that exist
        self._now = 0.0

    def update(self, pod: Mapping[str, Any], now: float) -> list[Event]:
        """Notes a pod as it is; returns the ends that were not counted before, which now are.

        Args:
            now: seconds since the epoch.
        """
        replica = replica_of(pod)
        if replica is None:
            return []
        uid = pod["metadata"]["uid"]
        run = self._run(replica, now)
        self._pods[uid] = pod
        found: list[Event] = []
        keys = run["counted"].setdefault(uid[-12:], [])
        for ended in terminations(pod):
            if ended.key in keys:
                continue
            keys.append(ended.key)
            self._count(run, replica, ended)
            found.append((replica, ended, _owner(pod)))
        run["state"] = self._state(replica, pod) or run["state"]
        self._bound()
        return found

    def forget(self, pod: Mapping[str, Any], now: float) -> list[Event]:
        """A pod was deleted: what its last object tells is counted, its keys are dropped."""
        found = self.update(pod, now)
        replica, uid = replica_of(pod), pod["metadata"]["uid"]
        if replica is not None:
            run = self._run(replica, now)
            run["gpu_seconds"] += _gpu_seconds(pod, self._latest(now))
            run["counted"].pop(uid[-12:], None)
            self._pods.pop(uid, None)
        return found

    def keep_only(self, uids: Iterable[str], now: float) -> None:
        """Pods of other uids are gone, as a new listing shows."""
        present = set(uids)
        for uid in set(self._pods) - present:
            self.forget(self._pods[uid], now)
        short = {uid[-12:] for uid in present}
        for run in self._runs.values():
            run["counted"] = {uid: keys for uid, keys in run["counted"].items() if uid in short}

    def to_json(self) -> str:
        """What a new exporter goes on from; the oldest runs are left out where they would not fit."""
        text = self._dump()
        while len(text.encode()) > MOST_BYTES and self._runs:
            self._drop(max(len(self._runs) // 10, 1))
            text = self._dump()
        return text

    def samples(self, now: float) -> Iterable[tuple[str, dict[str, str], float]]:
        """Name, labels and value of all that is exported."""
        live: dict[str, set[tuple[str, str]]] = {}
        seconds: dict[str, float] = {}
        running: dict[str, int] = {}
        for pod in self._pods.values():
            replica = replica_of(pod)
            assert replica is not None
            live.setdefault(_key(replica), set()).add((replica.kind, replica.index))
            seconds[_key(replica)] = seconds.get(_key(replica), 0.0) + _gpu_seconds(pod, self._latest(now))
            _, began, ended = gpu_run(pod)
            running[_key(replica)] = running.get(_key(replica), 0) + bool(began and not ended)
        for key, run in self._runs.items():
            labels = {"namespace": run["namespace"], "run": run["run"], "pool": run["pool"]}
            # All exits of a replica are there from its first pod on, so that an increase sees the first kill.
            kills = {(*who, code): 0 for who in live.get(key, ()) for code in OOM_EXITS}
            kills |= {tuple(name.split("/")): count for name, count in run["oom_killed"].items()}
            for (kind, index, code), count in kills.items():
                own = {"replica_type": kind, "replica_index": index, "exit_code": code}
                yield "wandistill_container_oom_killed_total", {**labels, **own}, count
            for cause in CAUSES:
                yield "wandistill_run_failures_total", {**labels, "cause": cause}, run["failures"].get(cause, 0)
            for state in STATES:
                yield "wandistill_run_state", {**labels, "state": state}, int(state == run["state"])
            yield "wandistill_run_pods", labels, running.get(key, 0)
            yield "wandistill_run_gpu_seconds_total", labels, run["gpu_seconds"] + seconds.get(key, 0.0)
            last = run["last"]
            for field, name in (
                ("exit_code", "wandistill_run_exit_code"),
                ("ended", "wandistill_run_ended_timestamp_seconds"),
                ("step", "wandistill_run_last_step"),
                ("loss", "wandistill_run_last_loss"),
            ):
                if isinstance(last.get(field), int | float):
                    yield name, labels, last[field]

    def _latest(self, now: float) -> float:
        """`now`, or what it was before the clock was set back: a counter that falls would count anew from zero."""
        self._now = max(self._now, now)
        return self._now

    def __len__(self) -> int:
        return len(self._runs)

    def _run(self, replica: Replica, now: float) -> dict[str, Any]:
        fresh = {
            "namespace": replica.namespace,
            "run": replica.run,
            "pool": replica.pool,
            "state": "pending",
            "oom_killed": {},
            "failures": {},
            "gpu_seconds": 0.0,
            "counted": {},
            "last": {},
        }
        run = self._runs.setdefault(_key(replica), fresh)
        run["seen"] = int(now) // _SEEN_SECONDS
        return run

    @staticmethod
    def _count(run: dict[str, Any], replica: Replica, ended: Termination) -> None:
        if ended.oom_killed:
            name = f"{replica.kind}/{replica.index}/{ended.oom_exit}"
            run["oom_killed"][name] = run["oom_killed"].get(name, 0) + 1
        if ended.cause is not None:
            run["failures"][ended.cause] = run["failures"].get(ended.cause, 0) + 1
        told = {key: ended.message[key] for key in ("step", "loss") if key in ended.message}
        run["last"] = {**run["last"], "exit_code": ended.exit_code, "ended": ended.finished, **told}

    @staticmethod
    def _state(replica: Replica, pod: Mapping[str, Any]) -> str | None:
        """The run's state, which is its master's."""
        phase = (pod.get("status") or {}).get("phase", "").lower()
        return phase if replica.kind == "master" and phase in STATES else None

    def _bound(self) -> None:
        if len(self._runs) > MOST_RUNS:
            self._drop(len(self._runs) - MOST_RUNS)

    def _drop(self, count: int) -> None:
        """Drops the runs that were seen last the longest ago."""
        for key in sorted(self._runs, key=lambda key: self._runs[key]["seen"])[:count]:
            del self._runs[key]
        self._pods = {
            uid: pod for uid, pod in self._pods.items() if (found := replica_of(pod)) and _key(found) in self._runs
        }

    def _dump(self) -> str:
        return json.dumps({"schema": 1, "runs": self._runs}, separators=(",", ":"))


def _key(replica: Replica) -> str:
    return f"{replica.namespace}/{replica.run}"


def _gpu_seconds(pod: Mapping[str, Any], now: float) -> float:
    gpus, began, ended = gpu_run(pod)
    return gpus * max((ended or now) - began, 0.0) if began else 0.0


def _owner(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reference of the object that made the pod; empty if none did."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), {})
