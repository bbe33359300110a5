"""Dashboard 2: memory of every rank and node over time."""

from __future__ import annotations

from wandistill.metrics.dashboards.build import RUN, Json, Panel, Query, dashboard


def memory() -> Json:
    """By term and state on the GPUs, by kind on the hosts."""
    return dashboard(
        "wandistill-memory",
        "wandistill / memory",
        "Memory of each rank by state and planned term, of each process and container, and of /dev/shm.",
        [("GPUs", _gpus()), ("Hosts", _hosts()), ("Pools", _pools()), ("DCGM, where it runs", _dcgm())],
    )


def _gpus() -> list[Panel]:
    unattributed = f"wandistill_rank_gpu_memory_unattributed_bytes{{{RUN}}}"
    states = f'wandistill_rank_gpu_memory_bytes{{state=~"allocated|reserved|peak|free|other", {RUN}}}'
    return [
        Panel(
            "GPU memory by state",
            "timeseries",
            [Query(states, "rank {{rank}} {{state}}")],
            "bytes",
            "Allocated within reserved, its peak, and what is free or held by other processes.",
            width=24,
            height=10,
            least=0,
        ),
        Panel(
            "Measured GPU memory by term",
            "timeseries",
            [
                Query(f"wandistill_rank_gpu_memory_measured_bytes{{{RUN}}}", "rank {{rank}} {{term}}"),
                Query(unattributed, "rank {{rank}} unattributed"),
            ],
            "bytes",
            "What torch has allocated at the moment, by what it is for; with the unattributed rest all of it.",
            width=12,
            height=10,
            stacked=True,
            least=0,
        ),
        Panel(
            "Planned GPU memory by term",
            "timeseries",
            [Query(f"wandistill_rank_gpu_memory_predicted_bytes{{{RUN}}}", "rank {{rank}} {{term}}")],
            "bytes",
            "The plan's terms at its peak; they add up to what the process takes.",
            width=12,
            height=10,
            stacked=True,
            least=0,
        ),
        Panel(
            "Unattributed",
            "timeseries",
            [
                Query(
                    f'{unattributed} / ignoring (state) wandistill_rank_gpu_memory_bytes{{state="allocated", {RUN}}}',
                    "rank {{rank}}",
                )
            ],
            "percentunit",
            "Share of the allocated memory that is of no term; what grows from step to step is a leak.",
            width=6,
            steps=(("green", None), ("yellow", 0.05)),
            least=0,
        ),
        Panel(
            "Fragmentation",
            "timeseries",
            [
                Query(
                    f'1 - wandistill_rank_gpu_memory_bytes{{state="allocated", {RUN}}} / ignoring (state) '
                    f'wandistill_rank_gpu_memory_bytes{{state="reserved", {RUN}}}',
                    "rank {{rank}}",
                )
            ],
            "percentunit",
            "Share of the reserved memory that is not allocated.",
            width=6,
            least=0,
            most=1,
        ),
        Panel(
            "GPUs",
            "table",
            [Query(f"wandistill_rank_gpu_info{{{RUN}}}", instant=True)],
            "none",
            "Which rank has which GPU.",
            width=12,
            columns={"run": "Run", "rank": "Rank", "node_rank": "Node", "gpu_name": "GPU", "gpu_uuid": "UUID"},
        ),
    ]


def _hosts() -> list[Panel]:
    def kind(name: str, title: str, description: str) -> Panel:
        return Panel(
            title,
            "timeseries",
            [Query(f'wandistill_rank_host_memory_bytes{{kind="{name}", {RUN}}}', "rank {{rank}}")],
            "bytes",
            description,
            width=6,
            least=0,
        )

    return [
        kind("rss", "Resident", "Of each rank's process."),
        kind("pss", "Proportional", "Each page counted once among the processes that map it: it adds up over ranks."),
        kind("shared", "Shared", "In shared memory, such as the teacher's one copy of a node."),
        kind("pinned", "Page-locked", "Registered with the GPU."),
        Panel(
            "Container memory",
            "timeseries",
            [Query(f"wandistill_pod_memory_bytes{{{RUN}}}", "{{run}} node {{node_rank}} {{state}}")],
            "bytes",
            "Usage with page cache, its peak, and the limit.",
            width=8,
            least=0,
        ),
        Panel(
            "/dev/shm",
            "timeseries",
            [Query(f"wandistill_pod_shm_bytes{{{RUN}}}", "{{run}} node {{node_rank}} {{state}}")],
            "bytes",
            "Used, and its size.",
            width=8,
            least=0,
        ),
        Panel(
            "Waiting for memory",
            "timeseries",
            [
                Query(
                    f"rate(wandistill_pod_memory_pressure_seconds_total{{{RUN}}}[5m])",
                    "{{run}} node {{node_rank}} {{share}}",
                )
            ],
            "percentunit",
            "Share of the time that some or all tasks waited for memory; cgroup version 2 alone tells it.",
            width=8,
            least=0,
        ),
    ]


def _pools() -> list[Panel]:
    return [
        Panel(
            "Host memory by pool",
            "timeseries",
            [Query(f'sum by (pool) (wandistill_pod_memory_bytes{{state="usage", {RUN}}})', "{{pool}}")],
            "bytes",
            "Usage of all containers of a pool.",
            width=12,
            least=0,
        ),
        Panel(
            "GPU memory by pool",
            "timeseries",
            [Query(f'sum by (pool) (wandistill_rank_gpu_memory_bytes{{state="reserved", {RUN}}})', "{{pool}}")],
            "bytes",
            "Reserved by all ranks of a pool.",
            width=12,
            least=0,
        ),
    ]


def _dcgm() -> list[Panel]:
    joined = f"on (gpu_uuid) group_left (run, rank) max by (gpu_uuid, run, rank) (wandistill_rank_gpu_info{{{RUN}}})"
    return [
        Panel(
            "GPU utilisation",
            "timeseries",
            [
                Query(
                    f'label_replace(DCGM_FI_DEV_GPU_UTIL, "gpu_uuid", "$1", "UUID", "(.*)") * {joined}',
                    "{{run}} rank {{rank}}",
                )
            ],
            "percent",
            "From DCGM's exporter, joined by the GPU's UUID.",
            width=12,
            least=0,
            most=100,
        ),
        Panel(
            "GPU memory used, by DCGM",
            "timeseries",
            [
                Query(
                    f'label_replace(DCGM_FI_DEV_FB_USED, "gpu_uuid", "$1", "UUID", "(.*)") * 1048576 * {joined}',
                    "{{run}} rank {{rank}}",
                )
            ],
            "bytes",
            "Of all processes; DCGM counts in MiB.",
            width=12,
            least=0,
        ),
    ]
