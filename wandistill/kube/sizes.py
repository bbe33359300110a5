"""The sizes of a job's pods: from the planner, or as `wandistill values` computed them; as Kubernetes writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wandistill.catalog import Model, find_gpu
from wandistill.errors import DoesNotFit
from wandistill.kube.pools import JobPools, Pool, question
from wandistill.kube.sizing import CORES, PREPARE_CORES, SCRATCH, Sizes, prepare_memory, sizes, teacher_and_students


@dataclass(frozen=True)
class PodSizes:
    """Of one pod."""

    memory: str
    shm: str
    cpus: str
    threads: int
    scratch: str


@dataclass(frozen=True)
class PoolSizes:
    """Of the pods of a job."""

    placement: str
    settings: Mapping[str, str] = field(default_factory=dict)
    step_seconds: float | None = None  # of an optimizer step, as planned
    pod: PodSizes = field(kw_only=True)  # of the pool
    master: PodSizes = field(kw_only=True)  # the same, but of the teacher's pool in teacher-and-students


def prepare_sizes(model: Model) -> PodSizes:
    """Of the pod that fetches a teacher and encodes the prompts."""
    cores = PREPARE_CORES[model.name == "embedded"]
    return PodSizes(f"{prepare_memory(model)}Mi", "", str(cores), cores, SCRATCH["none"])


def pool_sizes(values: Mapping[str, Any], job: JobPools) -> PoolSizes:
    """The sizes that the planner gives.

    Raises:
        DoesNotFit: the pool does not hold the run.
        ConfigError: an unknown model, GPU or student.
    """
    asked = question(values, job)
    try:
        if job.split:
            gpu = find_gpu(job.master.values["gpu"]) if job.master.on_gpu else None
            teacher, students = teacher_and_students(asked, gpu)
            return _written(job, students, teacher)
        own = sizes(asked)
        return _written(job, own, own)
    except DoesNotFit as error:
        raise DoesNotFit(f"pools.{job.pool.name}: {error}") from None


def _written(job: JobPools, pod: Sizes, master: Sizes) -> PoolSizes:
    placement = pod.placement.value
    return PoolSizes(
        placement,
        dict(pod.settings),
        pod.step_seconds,
        pod=pod_sizes(job.workers or job.master, pod, placement),
        master=pod_sizes(job.master, master, placement),
    )


def pod_sizes(pool: Pool, sized: Sizes, placement: str) -> PodSizes:
    """As Kubernetes writes them."""
    kind = "none" if not pool.on_gpu else "cpu" if placement == "cpu" else "gpu"
    return PodSizes(
        memory=f"{sized.memory}Mi",
        shm=f"{sized.shm}Mi",
        cpus=str(CORES[kind] * pool.ranks),
        threads=CORES[kind],
        scratch=SCRATCH["gpu" if pool.on_gpu else "none"],
    )
