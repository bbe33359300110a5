"""Dashboard 3: all runs."""

from __future__ import annotations

from wandistill.metrics.dashboards.build import RUN, Json, Panel, Query, dashboard


def fleet() -> Json:
    """Runs, pools, failures by cause and GPU hours, pods that are gone included."""
    return dashboard(
        "wandistill-fleet",
        "wandistill / fleet",
        "All runs and pools, why runs failed, and what they used.",
        [("Runs", _runs()), ("Failures", _failures()), ("Use", _use()), ("Exporter", _exporter())],
    )


def _runs() -> list[Panel]:
    return [
        Panel(
            "Runs by state",
            "stat",
            [Query(f"sum by (state) (wandistill_run_state{{{RUN}}})", "{{state}}")],
            "none",
            "Runs that the exporter remembers.",
            width=12,
            height=5,
        ),
        Panel(
            "Running pods by pool",
            "timeseries",
            [Query(f"sum by (pool) (wandistill_run_pods{{{RUN}}})", "{{pool}}")],
            "none",
            "Pods whose training container runs.",
            width=12,
            height=5,
            least=0,
        ),
        Panel(
            "Runs",
            "table",
            [Query(f"wandistill_run_state{{{RUN}}} == 1", instant=True)],
            "none",
            "The state of each run.",
            width=12,
            columns={"namespace": "Namespace", "run": "Run", "pool": "Pool", "state": "State"},
        ),
        Panel(
            "Last steps",
            "bargauge",
            [Query(f"wandistill_run_last_step{{{RUN}}}", "{{run}}")],
            "none",
            "Steps that each ended run had taken.",
            width=6,
            least=0,
        ),
        Panel(
            "Last losses",
            "bargauge",
            [Query(f"wandistill_run_last_loss{{{RUN}}}", "{{run}}")],
            "none",
            "Loss of each ended run's last step.",
            width=6,
        ),
    ]


def _failures() -> list[Panel]:
    return [
        Panel(
            "Failures by cause",
            "timeseries",
            [Query(f"sum by (cause) (increase(wandistill_run_failures_total{{{RUN}}}[1h]))", "{{cause}}")],
            "none",
            "Containers that ended badly within an hour.",
            width=8,
            stacked=True,
            least=0,
        ),
        Panel(
            "Containers killed for memory",
            "timeseries",
            [Query(f"sum by (run) (increase(wandistill_container_oom_killed_total{{{RUN}}}[1h]))", "{{run}}")],
            "none",
            "Within an hour; counted once each, by the exporter.",
            width=8,
            least=0,
        ),
        Panel(
            "How runs ended",
            "table",
            [
                Query(
                    f"wandistill_run_exit_code{{{RUN}}} and on (namespace, run) "
                    f"wandistill_run_ended_timestamp_seconds{{{RUN}}} > 0",
                    instant=True,
                )
            ],
            "none",
            "Exit code of each run's last container.",
            value="Exit code",
            columns={"namespace": "Namespace", "run": "Run", "pool": "Pool"},
        ),
    ]


def _use() -> list[Panel]:
    return [
        Panel(
            "GPU hours by pool",
            "bargauge",
            [Query(f"sum by (pool) (wandistill_run_gpu_seconds_total{{{RUN}}}) / 3600", "{{pool}}")],
            "h",
            "Held by the runs that the exporter remembers.",
            width=12,
            least=0,
        ),
        Panel(
            "Samples a second by pool",
            "timeseries",
            [Query(f"sum by (pool) (rate(wandistill_samples_total{{{RUN}}}[5m]))", "{{pool}}")],
            "none",
            "All runs of a pool.",
            width=12,
            least=0,
        ),
        Panel(
            "Pods by node, from kube-state-metrics",
            "timeseries",
            [
                Query(
                    "count by (node) (kube_pod_info * on (namespace, pod) group_left () "
                    f"max by (namespace, pod) (wandistill_pod_restarts_total{{{RUN}}} * 0 + 1))",
                    "{{node}}",
                )
            ],
            "none",
            "Which nodes the runs' pods are on.",
            width=24,
            height=5,
            least=0,
        ),
    ]


def _exporter() -> list[Panel]:
    return [
        Panel(
            "Leaders",
            "stat",
            [Query("sum (wandistill_exporter_leader)")],
            "none",
            "One exporter counts.",
            width=6,
            height=5,
            steps=(("red", None), ("green", 1), ("red", 2)),
        ),
        Panel(
            "Runs remembered",
            "stat",
            [Query("max (wandistill_exporter_runs)")],
            "none",
            "At most 1,000; the oldest are dropped.",
            width=6,
            height=5,
            steps=(("green", None), ("orange", 950)),
        ),
        Panel(
            "Refused by the API server",
            "timeseries",
            [Query("sum (rate(wandistill_exporter_errors_total[5m]))", "errors a second")],
            "none",
            "Answers that were errors.",
            width=12,
            height=5,
            least=0,
        ),
    ]
