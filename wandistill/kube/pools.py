"""From values to jobs: which pools make which job, what each asks the planner, and the rules that no schema can say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wandistill import config
from wandistill.catalog import Model, find_gpu, models
from wandistill.errors import ConfigError
from wandistill.kube.gojson import digest
from wandistill.kube.sizing import Question, one_node
from wandistill.kube.values import is_name
from wandistill.planner.from_config import request_of_config
from wandistill.student_config import student_spec
from wandistill.units import parse_bytes

TEACHER, STUDENTS = "teacher", "students"
# Settings that the chart writes itself, and where they belong.
OWNED = {
    "teacher_device_strategy": "pools.<name>.placement",
    "teacher_on_cpu": "pools.<name>.placement",
    "balanced_teacher": "pools.<name>.placement",
    "balance_teacher": "pools.<name>.placement",
    "sequential_teacher": "pools.<name>.placement",
    "teacher_dtype": "pools.<name>.dtype",
    "teacher_path": "teacher.model",
    "teacher_revision": "teacher.revision",
    "student_config": "student.config",
    "data_path": "data",
    "output_dir": "output",
    "device": "pools.<name>.gpusPerNode",
    "distributed": "pools.<name>.nodes",
    "config": "training",
    "resume": "the chart, which always passes auto",
    "metrics_port": "metrics.port",
}
# Settings with which the tables are made: the keys of the tables, or nothing that takes memory.
KEYED = ("optimizer", "mixed_precision", "resolution", "batch_size", "gradient_checkpointing")
# Settings that take memory too, by their fields of a PlanRequest; set, a pool is outside the tables.
SIZING = (
    "gradient_accumulation_steps",
    "teacher_micro_batch",
    "student_parallel",
    "ema_decay",
    "ema_device",
    "feature_weight",
    "embeddings",
    "targets",
    "memory_margin",
    "resident_blocks",
    "stream_fetch",
    "disk_buffer",
    "share_dir",
    "max_memory",
    "teacher_rank",
    "teacher_rank_trains",
)
POOL_INPUTS = ("nodes", "gpusPerNode", "gpu", "gpuMemory", "placement", "dtype", "processesPerNode")
TRAINING_INPUTS = (*KEYED, *SIZING, "guidance_scale", "guidance_scale_2", "teacher_device_map", "on_oom")


@dataclass(frozen=True)
class Pool:
    """A pool and its name."""

    name: str
    values: Mapping[str, Any]

    @property
    def on_gpu(self) -> bool:
        """Whether its pods have GPUs."""
        return bool(self.values["gpusPerNode"])

    @property
    def ranks(self) -> int:
        """Of a pod."""
        return int(self.values["gpusPerNode"] or self.values["processesPerNode"])

    @property
    def nodes(self) -> int:
        """Pods."""
        return int(self.values["nodes"])

    @property
    def dtype(self) -> str:
        """The teacher's dtype."""
        asked = str(self.values["dtype"])
        return asked if asked != "auto" else "bfloat16" if self.on_gpu else "float32"


@dataclass(frozen=True)
class JobPools:
    """The pools of one PyTorchJob."""

    pool: Pool  # whose name the job has
    master: Pool
    workers: Pool | None
    worker_count: int

    @property
    def split(self) -> bool:
        """Whether the teacher has a pool of its own."""
        return self.workers is not None and self.workers is not self.master


def jobs(values: Mapping[str, Any]) -> Sequence[JobPools]:
    """The jobs that the topology makes of the pools.

    Raises:
        ConfigError: pools that the topology cannot be made of.
    """
    pools = {name: Pool(name, pool) for name, pool in values["pools"].items()}
    topology = values["topology"]
    if not pools:
        raise ConfigError("pools is empty: take a preset, such as -f helm/wandistill/presets/4x24gb.yaml.")
    if topology == "single" and len(pools) != 1:
        raise ConfigError(
            f"topology single takes one pool, but pools has {', '.join(sorted(pools))}: set topology to independent "
            "for a job on each, or to teacher-and-students."
        )
    for pool in pools.values():
        _check_pool(pool)
    if topology == "teacher-and-students":
        if set(pools) != {TEACHER, STUDENTS}:
            raise ConfigError(
                f"topology teacher-and-students takes the pools {TEACHER} and {STUDENTS}, but pools has "
                f"{', '.join(sorted(pools))}."
            )
        teacher, students = pools[TEACHER], pools[STUDENTS]
        if teacher.nodes != 1 or teacher.ranks != 1:
            raise ConfigError(
                "pools.teacher: serves with one rank: set nodes to 1, and gpusPerNode or processesPerNode to 1."
            )
        for name in (TEACHER, STUDENTS):
            if pools[name].values["placement"] not in ("auto", "gpu0"):
                raise ConfigError(
                    f"pools.{name}.placement {pools[name].values['placement']}: teacher-and-students is gpu0; leave "
                    "placement out."
                )
        if teacher.on_gpu != students.on_gpu:
            raise ConfigError(
                "pools.teacher and pools.students: one has GPUs and the other none, but a job's ranks exchange tensors "
                "one way; give both GPUs, or neither."
            )
        if teacher.dtype != students.dtype:
            raise ConfigError(
                f"pools.teacher.dtype is {teacher.dtype} and pools.students.dtype {students.dtype}: the teacher has "
                "one dtype; give both the same."
            )
        return [JobPools(students, teacher, students, students.nodes)]
    return [JobPools(pool, pool, pool if pool.nodes > 1 else None, pool.nodes - 1) for _, pool in sorted(pools.items())]


def _check_pool(pool: Pool) -> None:
    values, where = pool.values, f"pools.{pool.name}"
    if not is_name(pool.name):
        raise ConfigError(f"{where}: a pool's name is lower-case letters, digits and '-', and begins with a letter.")
    if pool.on_gpu and not values["gpu"]:
        raise ConfigError(f"{where}.gpu is empty, but gpusPerNode is {values['gpusPerNode']}: name the GPU.")
    if not pool.on_gpu and values["gpu"]:
        raise ConfigError(f"{where}.gpu is {values['gpu']}, but gpusPerNode is 0: set the number of GPUs of a node.")
    if "mig-" in values["gpuResource"] and (values["gpusPerNode"] != 1 or not values["gpuMemory"]):
        raise ConfigError(
            f"{where}.gpuResource {values['gpuResource']}: a process sees one MIG device; set gpusPerNode to 1 and "
            "gpuMemory to the profile's memory."
        )


def check_training(training: Mapping[str, Any]) -> None:
    """Refuses settings that belong elsewhere, and those that `wandistill train` does not know.

    Raises:
        ConfigError: which, and where it belongs.
    """
    for key in sorted(training):
        name = key.replace("-", "_")
        if name in OWNED:
            raise ConfigError(f"training.{key}: belongs to {OWNED[name]}.")
    config.from_mapping({key.replace("-", "_"): value for key, value in training.items()})


def find_teacher(value: str) -> Model:
    """A model of the catalogue by its name or hub id.

    Raises:
        ConfigError: it is not there.
    """
    known = models()
    for model in known.values():
        if value in (model.name, *model.repositories):
            return model
    raise ConfigError(
        f"teacher.model {value}: is not in the catalogue; known are {', '.join(known)} and their hub ids. For weights "
        "of one of these shapes in a folder, set teacher.path."
    )


def question(values: Mapping[str, Any], job: JobPools) -> Question:
    """What the sizes of the job's pods depend on.

    Raises:
        ConfigError: an unknown model, GPU or student.
    """
    pool, training = job.pool, _plain(values["training"])
    model = find_teacher(values["teacher"]["model"])
    student = student_spec(values["student"]["custom"] or values["student"]["config"], model.architecture)
    run = config.from_mapping(training)
    memory = pool.values["gpuMemory"]
    gpu = find_gpu(pool.values["gpu"]) if pool.on_gpu else None
    resolved = replace(
        run,
        resolution=run.resolution or student.default_resolution(embedded=model.name == "embedded"),
        teacher_dtype=pool.dtype,
        teacher_device_strategy="gpu0" if job.split else str(pool.values["placement"]),
        save_samples=True,  # without them a little is left over
    )
    machines = one_node(gpu, pool.ranks, parse_bytes(str(memory)) if memory else None)
    request = request_of_config(resolved, model, student, machines)
    return Question(request, pool.nodes, run.on_oom == "replan")


def inputs(values: Mapping[str, Any], pool: Pool) -> str:
    """A digest of all that the sizes of a pool depend on; `computed` numbers hold for these inputs alone."""
    training = _plain(values["training"])
    return digest(
        {
            "teacher": values["teacher"]["model"],
            "student": values["student"],
            "pool": {key: str(pool.values[key]) for key in POOL_INPUTS},
            "topology": values["topology"],
            "training": {key: training[key] for key in TRAINING_INPUTS if key in training},
        },
        16,
    )


def _plain(training: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in training.items()}
