"""The one table of metrics: name, kind, unit, labels, help.

Exporters, the README's table, dashboards and alert rules are checked against it, both ways. Names have one prefix and
base units; counters end in `_total`, facts in `_info`. Every label has a bounded set of values, so a run's number of
series is bounded by its ranks and pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """Kinds of metrics, as OpenMetrics names them."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


class Scope(Enum):
    """Who serves a metric, and the labels that each of its series carries beside its own."""

    RANK = ("run", "pool", "rank", "local_rank", "node_rank")  # a pod, for each of its ranks
    POD = ("run", "pool", "node_rank")  # a pod, for itself
    RUN = ("run", "pool")  # the pod of rank 0, for the run
    CLUSTER = ("namespace", "run", "pool")  # the cluster exporter, for a run
    EXPORTER = ()  # the cluster exporter, for itself


@dataclass(frozen=True)
class Metric:
    """A row of the table.

    Args:
        labels: its own labels, beside those of its scope, with the values that each may have; none listed: a text of
            which a run has one.
    """

    name: str
    kind: Kind
    scope: Scope
    help: str
    unit: str = ""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The name without the suffix of its kind, as exposition formats declare it."""
        return self.name.removesuffix("_total").removesuffix("_info")

    @property
    def label_names(self) -> tuple[str, ...]:
        """All labels of its series."""
        return (*self.scope.value, *self.labels)

    @property
    def series(self) -> tuple[str, ...]:
        """The names that queries use."""
        if self.kind is Kind.HISTOGRAM:
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)


# What a rank is doing. Steps are taken in `train`; a rank is in `export` until its end.
PHASES = ("start", "load", "prepare", "train", "checkpoint", "sample", "export")
# A teacher with one expert has the high one.
EXPERTS = ("high", "low")
OOM_KINDS = ("cuda", "host", "cgroup", "shm")
# Parts of a step. `student` contains `forward`, and both lie with the others in `step`, `collective` apart.
PARTS = ("step", "teacher", "student", "forward", "data", "optimizer", "collective")
# How a container failed, the exit codes of one with a killed process, and states of a run, as the exporter tells them.
CAUSES = (
    "oom",
    "config",
    "training",
    "nonfinite",
    "unexpected",
    "interrupted",
    "peer",
    "terminated",
    "killed",
    "other",
)
OOM_EXITS = ("0", "1", "137", "other")
STATES = ("pending", "running", "succeeded", "failed")
GPU_STATES = ("allocated", "reserved", "peak", "total", "free", "other")
TERMS = ("teacher", "slots", "student", "gradients", "optimizer", "average", "activations", "encoders", "runtime")
# The runtime's memory is not torch's allocator's.
MEASURED_TERMS = tuple(term for term in TERMS if term != "runtime")
# Seconds; from a CPU's small step to a 14 B teacher read from disk.
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)

_TABLE = (
    # --- a rank's memory ---
    Metric(
        "wandistill_rank_gpu_memory_bytes",
        Kind.GAUGE,
        Scope.RANK,
        "Memory of the rank's GPU: allocated, reserved and peak (max_memory_allocated) by torch; total, free, and used "
        "by other than this process, by NVML",
        "bytes",
        {"state": GPU_STATES},
    ),
    Metric(
        "wandistill_rank_gpu_memory_predicted_bytes",
        Kind.GAUGE,
        Scope.RANK,
        "What the plan says of the rank's GPU at its peak, by term",
        "bytes",
        {"term": TERMS},
    ),
    Metric(
        "wandistill_rank_gpu_memory_predicted_peak_bytes",
        Kind.GAUGE,
        Scope.RANK,
        "The plan's max_memory_allocated, to be compared with the state peak",
        "bytes",
    ),
    Metric(
        "wandistill_rank_gpu_memory_measured_bytes",
        Kind.GAUGE,
        Scope.RANK,
        "What torch has allocated, by term: what lasts counted from its tensors, activations as the growth since a "
        "step of the last second, or other work, began",
        "bytes",
        {"term": MEASURED_TERMS},
    ),
    Metric(
        "wandistill_rank_gpu_memory_unattributed_bytes",
        Kind.GAUGE,
        Scope.RANK,
        "What was allocated when that step or work began and is of no term, such as a library's workspace or a leak; "
        "with the measured terms it adds up to the state allocated",
        "bytes",
    ),
    Metric(
        "wandistill_rank_gpu_info",
        Kind.INFO,
        Scope.RANK,
        "The rank's GPU, for joins with DCGM's series",
        labels={"gpu_uuid": (), "gpu_name": ()},
    ),
    Metric(
        "wandistill_rank_gpu_allocator_retries_total",
        Kind.COUNTER,
        Scope.RANK,
        "Times that torch's allocator emptied its cache to find room",
    ),
    Metric(
        "wandistill_rank_host_memory_bytes",
        Kind.GAUGE,
        Scope.RANK,
        "Host memory of the rank's process: resident (rss), its share of pages that others map too (pss), the part of "
        "rss in shared memory, such as the shared teacher (shared), page-locked for the GPU (pinned)",
        "bytes",
        {"kind": ("rss", "pss", "shared", "pinned")},
    ),
    # --- a rank's steps ---
    Metric("wandistill_step", Kind.GAUGE, Scope.RANK, "Optimizer steps taken"),
    Metric("wandistill_loss", Kind.GAUGE, Scope.RANK, "Loss of the last step, mean over the global batch"),
    Metric("wandistill_learning_rate", Kind.GAUGE, Scope.RANK, "Learning rate of the last step"),
    Metric("wandistill_gradient_norm", Kind.GAUGE, Scope.RANK, "Norm of the last step's gradient, before clipping"),
    Metric("wandistill_samples_total", Kind.COUNTER, Scope.RANK, "The rank's share of the samples of this try"),
    Metric(
        "wandistill_step_seconds",
        Kind.HISTOGRAM,
        Scope.RANK,
        "Seconds of a step and of its parts; student contains forward, collective is the wait for the other ranks "
        "after the step",
        "seconds",
        {"part": PARTS},
    ),
    Metric(
        "wandistill_rank_step_median_seconds",
        Kind.GAUGE,
        Scope.RANK,
        "Median seconds from one step's end to the next, over the last 101 steps",
        "seconds",
    ),
    Metric(
        "wandistill_rank_last_step_timestamp_seconds",
        Kind.GAUGE,
        Scope.RANK,
        "When the last step ended; when the rank began, before the first",
        "seconds",
    ),
    Metric(
        "wandistill_rank_snapshot_age_seconds",
        Kind.GAUGE,
        Scope.RANK,
        "Age of what the rank last told; above 30 only step, time and phase of the rank are served",
        "seconds",
    ),
    Metric(
        "wandistill_rank_phase",
        Kind.GAUGE,
        Scope.RANK,
        "1 for what the rank is doing, 0 for the others",
        labels={"phase": PHASES},
    ),
    Metric(
        "wandistill_rank_expert",
        Kind.GAUGE,
        Scope.RANK,
        "1 for the teacher's expert of the last step, 0 for the other",
        labels={"expert": EXPERTS},
    ),
    Metric(
        "wandistill_rank_nonfinite_total",
        Kind.COUNTER,
        Scope.RANK,
        "Steps whose target, loss or gradient was not finite; fp16's loss scale skips the latter now and then",
    ),
    Metric(
        "wandistill_rank_link_bytes_total",
        Kind.COUNTER,
        Scope.RANK,
        "Bytes of teacher weights copied to the rank's device while training",
        "bytes",
    ),
    Metric(
        "wandistill_checkpoint_interval_steps", Kind.GAUGE, Scope.RUN, "Steps from one checkpoint to the next", "steps"
    ),
    Metric("wandistill_checkpoint_seconds", Kind.GAUGE, Scope.RUN, "Seconds of the last checkpoint", "seconds"),
    Metric("wandistill_checkpoint_bytes", Kind.GAUGE, Scope.RUN, "Bytes of the last checkpoint, all ranks'", "bytes"),
    Metric(
        "wandistill_checkpoint_timestamp_seconds",
        Kind.GAUGE,
        Scope.RUN,
        "When the last checkpoint was whole; when training began, before the first",
        "seconds",
    ),
    # --- a pod ---
    Metric(
        "wandistill_pod_memory_bytes",
        Kind.GAUGE,
        Scope.POD,
        "Memory of the container's cgroup, version 1 or 2; without a limit there is no series of it",
        "bytes",
        {"state": ("usage", "limit", "peak")},
    ),
    Metric(
        "wandistill_pod_shm_bytes", Kind.GAUGE, Scope.POD, "/dev/shm of the pod", "bytes", {"state": ("used", "size")}
    ),
    Metric(
        "wandistill_pod_memory_pressure_seconds_total",
        Kind.COUNTER,
        Scope.POD,
        "Seconds that some or all tasks waited for memory (cgroup version 2)",
        "seconds",
        {"share": ("some", "full")},
    ),
    Metric("wandistill_pod_oom_kills_total", Kind.COUNTER, Scope.POD, "Processes that the kernel killed in the cgroup"),
    Metric("wandistill_pod_restarts_total", Kind.COUNTER, Scope.POD, "Times that the ranks were started anew"),
    Metric("wandistill_pod_replans_total", Kind.COUNTER, Scope.POD, "Those of them with another placement"),
    Metric("wandistill_pod_exit_code", Kind.GAUGE, Scope.POD, "Exit code of the last try that ended"),
    Metric(
        "wandistill_oom_events_total",
        Kind.COUNTER,
        Scope.POD,
        "Out-of-memory events by what ran out, rank and phase",
        labels={"kind": OOM_KINDS, "rank": (), "phase": PHASES},
    ),
    # --- a run ---
    Metric(
        "wandistill_build_info",
        Kind.INFO,
        Scope.RUN,
        "Versions that take part",
        labels={"version": (), "torch": (), "python": ()},
    ),
    Metric(
        "wandistill_config_info",
        Kind.INFO,
        Scope.RUN,
        "What is distilled into what",
        labels={"teacher": (), "student": (), "teacher_dtype": (), "resolution": (), "world_size": ()},
    ),
    Metric(
        "wandistill_placement_info",
        Kind.INFO,
        Scope.RUN,
        "The teacher's placement as it was asked for and as it is",
        labels={"asked": (), "resolved": ()},
    ),
    Metric("wandistill_progress_ratio", Kind.GAUGE, Scope.RUN, "Steps taken over steps in all", "ratio"),
    Metric(
        "wandistill_predicted_end_timestamp_seconds",
        Kind.GAUGE,
        Scope.RUN,
        "When the last step will end at the present pace",
        "seconds",
    ),
    # --- the cluster, after the pods are gone too ---
    Metric(
        "wandistill_container_oom_killed_total",
        Kind.COUNTER,
        Scope.CLUSTER,
        "Containers that the kernel killed a process of for memory, by replica and the exit code that they ended with",
        labels={"replica_type": (), "replica_index": (), "exit_code": OOM_EXITS},
    ),
    Metric(
        "wandistill_run_failures_total",
        Kind.COUNTER,
        Scope.CLUSTER,
        "Containers that ended badly, by cause",
        labels={"cause": CAUSES},
    ),
    Metric(
        "wandistill_run_state",
        Kind.GAUGE,
        Scope.CLUSTER,
        "1 for the state of the run's master, 0 for the others",
        labels={"state": STATES},
    ),
    Metric("wandistill_run_pods", Kind.GAUGE, Scope.CLUSTER, "Pods of the run whose training container runs"),
    Metric(
        "wandistill_run_gpu_seconds_total",
        Kind.COUNTER,
        Scope.CLUSTER,
        "GPUs that the run's containers held, times seconds",
        "seconds",
    ),
    Metric("wandistill_run_exit_code", Kind.GAUGE, Scope.CLUSTER, "Exit code of the last container that ended"),
    Metric("wandistill_run_ended_timestamp_seconds", Kind.GAUGE, Scope.CLUSTER, "When that container ended", "seconds"),
    Metric("wandistill_run_last_step", Kind.GAUGE, Scope.CLUSTER, "Steps taken, as its end told them"),
    Metric("wandistill_run_last_loss", Kind.GAUGE, Scope.CLUSTER, "Loss of the last step, as its end told it"),
    Metric("wandistill_exporter_leader", Kind.GAUGE, Scope.EXPORTER, "1 if this exporter counts, 0 if it waits"),
    Metric("wandistill_exporter_runs", Kind.GAUGE, Scope.EXPORTER, "Runs that are remembered, 1,000 at most"),
    Metric(
        "wandistill_exporter_errors_total", Kind.COUNTER, Scope.EXPORTER, "Answers of the API server that were errors"
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}


def series_names() -> set[str]:
    """Every name that a query may use."""
    return {name for metric in METRICS.values() for name in metric.series}
