"""The cluster exporter's loop: list, watch, count, remember, tell."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone

from prometheus_client.core import Metric as Family

from wandistill.metrics.exporter.api import Api, Refused
from wandistill.metrics.exporter.leader import Leadership
from wandistill.metrics.exporter.ledger import Event, Ledger
from wandistill.metrics.families import Families

_log = logging.getLogger(__name__)

# The lease is renewed between watches, so a watch must be much shorter than the lease.
_WATCH_SECONDS = 10
_WAIT_SECONDS = 5.0


class Exporter:
    """Counts while it leads; `collect` may be called from any thread.

    Args:
        identity: of this process among exporters, such as its pod's name.
    """

    def __init__(self, api: Api, identity: str) -> None:
        self._api = api
        self._leadership = Leadership(api, identity)
        self._lock = threading.Lock()
        self._ledger: Ledger | None = None
        self._saved, self._version = "", ""
        self._errors = 0
        self._stop = threading.Event()

    def stop(self) -> None:
        """Ends `run` soon."""
        self._stop.set()

    def run(self) -> None:
        """Works until `stop`; an API server that fails is asked again."""
        while not self._stop.is_set():
            try:
                self.work()
            except Refused as error:
                with self._lock:
                    self._errors += 1
                    # What is remembered is read anew: another exporter may have counted meanwhile.
                    self._ledger = None
                _log.warning(f"the API server answered {error.status or 'nothing'}: {error}")
                self._stop.wait(_WAIT_SECONDS)
        with self._lock:
            self._ledger = None
        try:
            self._leadership.release()
        except Refused as error:
            _log.warning(f"the lease could not be released ({error.status}): the next exporter waits for its end")

    def work(self) -> None:
        """Leads as long as it can, or waits once.

        Raises:
            Refused: by the API server.
        """
        if not self._leadership.hold():
            with self._lock:
                self._ledger = None
            self._stop.wait(_WAIT_SECONDS)
            return
        if self._ledger is None:
            self._saved, self._version = self._api.read_state()
            ledger = Ledger(self._saved)
        else:
            ledger = self._ledger
        pods, version = self._api.list_pods()
        with self._lock:
            now = time.time()
            events = [event for pod in pods for event in ledger.update(pod, now)]
            ledger.keep_only([pod["metadata"]["uid"] for pod in pods], now)
            self._ledger = ledger
        self._settle(events)
        while not self._stop.is_set() and self._leadership.hold():
            try:
                version = self._watch(ledger, version)
            except Refused as error:
                if error.status == 410:  # the version is too old: list anew
                    return
                raise

    def _watch(self, ledger: Ledger, version: str) -> str:
        for kind, pod in self._api.watch_pods(version, _WATCH_SECONDS):
            version = pod["metadata"]["resourceVersion"]
            if kind == "BOOKMARK":
                continue
            with self._lock:
                change = ledger.forget if kind == "DELETED" else ledger.update
                events = change(pod, time.time())
            self._settle(events)
            if self._stop.is_set():
                break
        return version

    def _settle(self, events: list[Event]) -> None:
        """Remembers what changed, then tells it: an exporter that dies between the two has told nothing twice."""
        with self._lock:
            assert self._ledger is not None
            text = self._ledger.to_json()
        if text != self._saved:
            self._version = self._api.write_state(text, self._version)
            self._saved = text
        for event in events:
            self._tell(event)

    def _tell(self, event: Event) -> None:
        replica, ended, owner = event
        if ended.cause is None and not ended.oom_killed:
            return
        if not owner:
            return
        if ended.oom_killed:
            reason, text = "OutOfMemoryKill", "the kernel killed a process of it for memory"
        else:
            reason, text = "ReplicaFailed", f"cause: {ended.cause}"
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        involved = {key: owner[key] for key in ("apiVersion", "kind", "name", "uid")} | {"namespace": replica.namespace}
        fields = {
            "type": "Warning",
            "reason": reason,
            "message": f"{replica.name} ended with exit code {ended.exit_code}: {text}",
            "source": {"component": "wandistill-exporter"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        name = f"{replica.run}.{replica.name}.{ended.key.lower()}".replace(":", "")
        try:
            self._api.create_event(replica.namespace, name, involved, fields)
        except Refused as error:
            # It is counted; not being allowed to tell of it must not stop the counting.
            with self._lock:
                self._errors += 1
            _log.warning(f"an Event on {replica.run} was refused ({error.status}): {error}")

    def collect(self) -> Iterator[Family]:
        """The families, as a prometheus_client collector."""
        families = Families()
        with self._lock:
            ledger = self._ledger
            families.add("wandistill_exporter_leader", {}, int(ledger is not None))
            families.add("wandistill_exporter_errors_total", {}, self._errors)
            if ledger is not None:
                families.add("wandistill_exporter_runs", {}, len(ledger))
                for name, labels, value in ledger.samples(time.time()):
                    families.add(name, labels, value)
        yield from families
