"""Dashboard 1: one run at a glance."""

from __future__ import annotations

from wandistill.metrics.dashboards.build import RUN, Json, Panel, Query, dashboard

_OWN = f'sum by (rank) (rate(wandistill_step_seconds_sum{{part=~"teacher|forward|data", {RUN}}}[5m]))'
_STEPS = f'sum by (rank) (rate(wandistill_step_seconds_count{{part="step", {RUN}}}[5m]))'
_PARTS = "teacher|student|data|optimizer|collective"


def run_overview() -> Json:
    """Progress, loss, pace, memory and what went wrong."""
    return dashboard(
        "wandistill-run",
        "wandistill / run",
        "Progress, loss, pace and memory of a run, and every out-of-memory.",
        [
            ("Progress", _progress()),
            ("Training", _training()),
            ("Where the time goes", _time()),
            ("Memory", _memory()),
            ("What went wrong", _failures()),
        ],
    )


def _progress() -> list[Panel]:
    return [
        Panel(
            "Progress",
            "stat",
            [Query(f"wandistill_progress_ratio{{{RUN}}}", "{{run}}")],
            "percentunit",
            "Steps taken over steps in all.",
            width=6,
            height=5,
            least=0,
            most=1,
        ),
        Panel(
            "Steps",
            "stat",
            [Query(f"max by (run) (wandistill_step{{{RUN}}})", "{{run}}")],
            "none",
            "Optimizer steps taken.",
            width=6,
            height=5,
        ),
        Panel(
            "Time left",
            "stat",
            [Query(f"clamp_min(wandistill_predicted_end_timestamp_seconds{{{RUN}}} - time(), 0)", "{{run}}")],
            "s",
            "At the median pace of the last 101 steps.",
            width=6,
            height=5,
        ),
        Panel(
            "Last checkpoint",
            "stat",
            [Query(f"time() - wandistill_checkpoint_timestamp_seconds{{{RUN}}}", "{{run}}")],
            "s",
            "Age of the last whole checkpoint: what a kill would cost now.",
            width=6,
            height=5,
            steps=(("green", None), ("orange", 3600), ("red", 4 * 3600)),
        ),
        Panel(
            "Run",
            "table",
            [
                Query(
                    f"wandistill_config_info{{{RUN}}} * on (namespace, run) group_left (asked, resolved) "
                    f"wandistill_placement_info{{{RUN}}} * on (namespace, run) group_left (version, torch) "
                    f"wandistill_build_info{{{RUN}}} * on (namespace, run) group_left () "
                    f"wandistill_checkpoint_interval_steps{{{RUN}}}",
                    instant=True,
                )
            ],
            "none",
            "What is distilled into what, where the teacher lives, and steps between checkpoints.",
            width=24,
            height=4,
            value="Checkpoint every",
            columns={
                "run": "Run",
                "teacher": "Teacher",
                "student": "Student",
                "teacher_dtype": "Dtype",
                "resolution": "Size",
                "world_size": "Ranks",
                "asked": "Asked",
                "resolved": "Placement",
                "version": "Version",
                "torch": "torch",
            },
        ),
    ]


def _training() -> list[Panel]:
    return [
        Panel(
            "Loss",
            "timeseries",
            [Query(f'wandistill_loss{{rank="0", {RUN}}}', "{{run}}")],
            "none",
            "Mean over the global batch.",
        ),
        Panel(
            "Samples a second",
            "timeseries",
            [Query(f"sum by (run) (rate(wandistill_samples_total{{{RUN}}}[5m]))", "{{run}}")],
            "none",
            "All ranks together.",
            least=0,
        ),
        Panel(
            "Gradient norm",
            "timeseries",
            [
                Query(f'wandistill_gradient_norm{{rank="0", {RUN}}}', "{{run}} norm"),
                Query(f"sum by (run) (wandistill_rank_nonfinite_total{{{RUN}}})", "{{run}} not finite"),
            ],
            "none",
            "Before clipping; and steps whose target, loss or gradient was not finite.",
        ),
        Panel(
            "Learning rate",
            "timeseries",
            [Query(f'wandistill_learning_rate{{rank="0", {RUN}}}', "{{run}}")],
            "sci",
            "Of the last step.",
            least=0,
        ),
        Panel(
            "Expert",
            "timeseries",
            [Query(f'avg_over_time(wandistill_rank_expert{{rank="0", {RUN}}}[5m])', "{{run}} {{expert}}")],
            "percentunit",
            "Share of the last five minutes' scrapes in which each of the teacher's experts was asked.",
            least=0,
            most=1,
        ),
        Panel(
            "Checkpoints",
            "timeseries",
            [Query(f"wandistill_checkpoint_seconds{{{RUN}}}", "{{run}}")],
            "s",
            "Seconds that the last checkpoint took.",
            width=4,
            least=0,
        ),
        Panel(
            "Checkpoint size",
            "timeseries",
            [Query(f"wandistill_checkpoint_bytes{{{RUN}}}", "{{run}}")],
            "bytes",
            "Of the last checkpoint.",
            width=4,
            least=0,
        ),
    ]


def _time() -> list[Panel]:
    return [
        Panel(
            "A step's parts",
            "timeseries",
            [
                Query(
                    f'sum by (part) (rate(wandistill_step_seconds_sum{{part=~"{_PARTS}", {RUN}}}[5m])) '
                    "/ ignoring (part) group_left () "
                    f'sum (rate(wandistill_step_seconds_count{{part="step", {RUN}}}[5m]))',
                    "{{part}}",
                )
            ],
            "s",
            "Mean seconds a step, over the ranks; student is forward and backward, collective the wait after the step.",
            stacked=True,
            least=0,
        ),
        Panel(
            "A step's seconds",
            "timeseries",
            [
                Query(
                    f'histogram_quantile({quantile}, sum by (le) (rate(wandistill_step_seconds_bucket{{part="step", '
                    f"{RUN}}}[5m])))",
                    f"{100 * quantile:g} %",
                )
                for quantile in (0.5, 0.95)
            ],
            "s",
            "Quantiles over ranks and steps.",
            least=0,
        ),
        Panel(
            "Own work of each rank",
            "timeseries",
            [Query(f"{_OWN} / {_STEPS}", "rank {{rank}}")],
            "s",
            "Teacher, forward and data, without the waits for others: the slowest rank sets the pace.",
            least=0,
        ),
        Panel(
            "Since the last step",
            "bargauge",
            [
                Query(
                    f"(time() - wandistill_rank_last_step_timestamp_seconds{{{RUN}}}) / "
                    f"clamp_min(5 * wandistill_rank_step_median_seconds{{{RUN}}}, 60)",
                    "{{run}} rank {{rank}}",
                )
            ],
            "percentunit",
            "Of the time after which the rank counts as stalled: five median steps, and a minute at least.",
            least=0,
            most=1,
            steps=(("green", None), ("orange", 0.5), ("red", 1)),
        ),
        Panel(
            "Age of each rank's word",
            "bargauge",
            [Query(f"wandistill_rank_snapshot_age_seconds{{{RUN}}}", "{{run}} rank {{rank}}")],
            "s",
            "A rank writes every second; one that is stopped does not.",
            least=0,
            steps=(("green", None), ("orange", 5), ("red", 30)),
        ),
        Panel(
            "What each rank does",
            "table",
            [Query(f"wandistill_rank_phase{{{RUN}}} == 1", instant=True)],
            "none",
            "The phase of each rank.",
            columns={"run": "Run", "node_rank": "Node", "rank": "Rank", "phase": "Phase"},
        ),
        Panel(
            "Teacher bytes over the link",
            "timeseries",
            [Query(f"rate(wandistill_rank_link_bytes_total{{{RUN}}}[5m])", "{{run}} rank {{rank}}")],
            "Bps",
            "Weights copied to each rank's device.",
            width=24,
            height=6,
            least=0,
        ),
    ]


def _memory() -> list[Panel]:
    def gpu(state: str) -> str:
        return f'wandistill_rank_gpu_memory_bytes{{state="{state}", {RUN}}}'

    return [
        Panel(
            "GPU memory left at the peak",
            "bargauge",
            [
                Query(
                    f"({gpu('free')} + ignoring (state) {gpu('reserved')} - ignoring (state) {gpu('peak')}) / "
                    f"ignoring (state) {gpu('total')}",
                    "{{run}} rank {{rank}}",
                )
            ],
            "percentunit",
            "Of each rank's GPU; under 5 % the next larger allocation may end the run.",
            width=12,
            least=0,
            most=1,
            steps=(("red", None), ("orange", 0.05), ("green", 0.1)),
        ),
        Panel(
            "Plan against measured",
            "timeseries",
            [
                Query(gpu("peak"), "rank {{rank}} measured"),
                Query(f"wandistill_rank_gpu_memory_predicted_peak_bytes{{{RUN}}}", "rank {{rank}} planned"),
            ],
            "bytes",
            "Peak of what torch allocated, and what the plan said.",
            width=12,
            least=0,
        ),
        Panel(
            "Container memory",
            "timeseries",
            [Query(f"wandistill_pod_memory_bytes{{{RUN}}}", "node {{node_rank}} {{state}}")],
            "bytes",
            "Usage with page cache, its peak, and the limit at which the kernel kills.",
            width=12,
            least=0,
        ),
        Panel(
            "Host memory of each rank",
            "timeseries",
            [Query(f'wandistill_rank_host_memory_bytes{{kind="rss", {RUN}}}', "rank {{rank}}")],
            "bytes",
            "Resident; the shared teacher counts for each rank that touched it.",
            width=12,
            least=0,
        ),
    ]


def _failures() -> list[Panel]:
    return [
        Panel(
            "Out of memory",
            "table",
            [
                Query(
                    f"sum by (run, rank, kind, phase) (wandistill_oom_events_total{{{RUN}}}) > 0 or "
                    "sum by (run, replica_type, replica_index, exit_code) "
                    f"(wandistill_container_oom_killed_total{{{RUN}}}) > 0",
                    instant=True,
                )
            ],
            "none",
            "Each rank's and each container's out-of-memory events.",
            width=12,
            value="Events",
            columns={
                "run": "Run",
                "rank": "Rank",
                "kind": "Kind",
                "phase": "Phase",
                "replica_type": "Replica",
                "replica_index": "Index",
                "exit_code": "Exit code",
            },
        ),
        Panel(
            "Restarts",
            "timeseries",
            [
                Query(f"wandistill_pod_restarts_total{{{RUN}}}", "node {{node_rank}} restarts"),
                Query(f"wandistill_pod_replans_total{{{RUN}}}", "node {{node_rank}} replans"),
                Query(f"wandistill_pod_exit_code{{{RUN}}}", "node {{node_rank}} last exit code"),
            ],
            "none",
            "Starts of the ranks after the first, those with another placement, and how the last try ended.",
            width=4,
            least=0,
        ),
        Panel(
            "Kernel kills",
            "timeseries",
            [Query(f"wandistill_pod_oom_kills_total{{{RUN}}}", "node {{node_rank}}")],
            "none",
            "Processes that the kernel killed for memory in each container.",
            width=4,
            least=0,
        ),
        Panel(
            "Allocator retries",
            "timeseries",
            [Query(f"wandistill_rank_gpu_allocator_retries_total{{{RUN}}}", "rank {{rank}}")],
            "none",
            "Times that torch emptied its cache to find room: a run near its limit, and slow.",
            width=4,
            least=0,
        ),
        Panel(
            "Alerts",
            "table",
            [Query('ALERTS{alertname=~"Wandistill.*", namespace=~"$namespace", run=~"$run"}', instant=True)],
            "none",
            "Alerts that are pending or firing.",
            width=24,
            height=6,
            columns={"alertname": "Alert", "alertstate": "State", "severity": "Severity", "run": "Run", "rank": "Rank"},
        ),
    ]
