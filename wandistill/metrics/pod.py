"""The endpoint of a pod, or of a host without Kubernetes: one registry on one port, collected anew at each scrape."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric as Family

from wandistill.errors import ConfigError
from wandistill.metrics.families import Families
from wandistill.metrics.names import METRICS, OOM_KINDS, PHASES, Scope
from wandistill.metrics.pod_memory import container_samples
from wandistill.metrics.snapshot import Snapshot, read_all

_log = logging.getLogger(__name__)

# A rank that lives but has told nothing for so long (stopped, or stuck without giving up Python's lock) keeps only the
# series that stay true.
STALE_SECONDS = 30.0
_STAYS_TRUE = (
    "wandistill_step",
    "wandistill_rank_last_step_timestamp_seconds",
    "wandistill_rank_step_median_seconds",
    "wandistill_rank_phase",
)
_AGE = "wandistill_rank_snapshot_age_seconds"
# Ranks of one pod; more than this many snapshots are somebody's mistake.
_MOST_RANKS = 256


@dataclass
class PodState:
    """What the supervisor knows of its pod; its methods and attributes may be used from any thread.

    Args:
        run: the PyTorchJob's name, or the output directory's.
        pool: the pool's name.
    """

    run: str
    pool: str
    node_rank: int
    restarts: int = 0
    replans: int = 0
    exit_code: int | None = None
    _oom: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    _ranks: dict[int, None] = field(default_factory=dict)  # those seen, the last one last
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_oom(self, kind: str, rank: int, phase: str) -> None:
        """Counts an out-of-memory of `rank`; `kind` and `phase` as in `wandistill.metrics.names`."""
        if kind not in OOM_KINDS or phase not in PHASES:
            raise ValueError(f"an out-of-memory is one of {OOM_KINDS} in one of {PHASES}, not {kind!r} in {phase!r}")
        with self._lock:
            self._see(rank)
            self._oom[kind, rank, phase] += 1

    def oom_counts(self, ranks: list[int]) -> dict[tuple[str, int, str], int]:
        """Counts of all kinds and phases for each rank that was seen: the first event raises a series that is there.

        Of many ranks those seen last are kept, and all that have had an event.
        """
        with self._lock:
            for rank in ranks[:_MOST_RANKS]:
                self._see(rank)
            return {
                (kind, rank, phase): self._oom[kind, rank, phase]
                for rank in sorted(self._ranks)
                for kind in OOM_KINDS
                for phase in PHASES
            }

    def _see(self, rank: int) -> None:
        self._ranks.pop(rank, None)
        self._ranks[rank] = None
        if len(self._ranks) > _MOST_RANKS:
            struck = {rank for _, rank, _ in self._oom}
            for spare in [seen for seen in self._ranks if seen not in struck][:1]:
                del self._ranks[spare]


class PodCollector:
    """Everything that a pod serves, read when it is asked for."""

    def __init__(self, state: PodState, snapshots: Path) -> None:
        self._state, self._snapshots = state, snapshots

    def collect(self) -> Iterator[Family]:
        """The families, with the present values."""
        families = Families()
        snapshots = read_all(self._snapshots)[:_MOST_RANKS]
        for snapshot in snapshots:
            self._rank(families, snapshot)
        self._pod(families, [snapshot.rank for snapshot in snapshots])
        yield from families

    def _rank(self, families: Families, snapshot: Snapshot) -> None:
        run = {"run": self._state.run, "pool": self._state.pool}
        rank = {
            **run,
            "rank": str(snapshot.rank),
            "local_rank": str(snapshot.local_rank),
            "node_rank": str(snapshot.node_rank),
        }
        age, jump = snapshot.age(), snapshot.clock_jump()
        families.add(_AGE, rank, round(age, 3))
        for name, samples in snapshot.samples.items():
            # A rank that told its age itself would make a series that is there twice.
            if name == _AGE or (age > STALE_SECONDS and name not in _STAYS_TRUE):
                continue
            # One bad sample, such as another version's, costs that sample alone.
            for sample in samples if isinstance(samples, list) else ():
                try:
                    own, value = sample
                    scope = METRICS[name].scope
                    if name.endswith("timestamp_seconds") and abs(jump) > 1:
                        value += jump
                    families.add(name, {**(rank if scope is Scope.RANK else run), **own}, value)
                except (KeyError, ValueError, TypeError, OverflowError) as error:
                    _log.debug(f"rank {snapshot.rank}: {name} is left out: {error}")

    def _pod(self, families: Families, ranks: list[int]) -> None:
        state = self._state
        pod = {"run": state.run, "pool": state.pool, "node_rank": str(state.node_rank)}
        for name, own, value in container_samples():
            families.add(name, {**pod, **own}, value)
        families.add("wandistill_pod_restarts_total", pod, state.restarts)
        families.add("wandistill_pod_replans_total", pod, state.replans)
        if state.exit_code is not None:
            families.add("wandistill_pod_exit_code", pod, state.exit_code)
        for (kind, rank, phase), count in state.oom_counts(ranks).items():
            own = {"kind": kind, "rank": str(rank), "phase": phase}
            families.add("wandistill_oom_events_total", {**pod, **own}, count)


class Endpoint:
    """A registry served over HTTP by a thread, as OpenMetrics to those who ask for it.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(self, collector: object, port: int, *, address: str = "0.0.0.0") -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)  # type: ignore[arg-type]
        try:
            self._server, self._thread = start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"--metrics_port {port}: cannot be listened on ({error.strerror}); give another, or 0 for none."
            ) from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(state: PodState, snapshots: Path, port: int) -> Endpoint:
    """Serves a pod's metrics on `port` (0: any free one) until `close`."""
    return Endpoint(PodCollector(state, snapshots), port)
