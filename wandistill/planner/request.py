"""What the planner is asked: a teacher, a student, machines, and the settings of a run that take memory or time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from wandistill.architecture import WanArchitecture
from wandistill.catalog import Gpu, Model
from wandistill.config import TrainConfig
from wandistill.device_map import DeviceMap
from wandistill.errors import ConfigError
from wandistill.planner.activations import Pass
from wandistill.planner.tape import Compute

TEACHER_DTYPES = ("float32", "float16", "bfloat16", "int8", "float8")
OPTIMIZERS = ("adamw", "adamw_bf16", "adamw8bit")
MARGIN = TrainConfig.memory_margin


@dataclass(frozen=True)
class Machines:
    """The nodes of a run, all alike."""

    gpu: Gpu | None  # None: the student trains on the CPU
    ranks: int  # on each node: GPUs, or processes without one
    nodes: int
    host_memory: int  # bytes that a node's processes may take together
    cores: int  # of a node
    shm: int | None = None  # bytes of /dev/shm; None: as large as the memory
    disk: int | None = None  # free bytes for caches and checkpoints; None: not limited
    disk_rate: float = 3.0  # GB/s of sequential reads
    gpu_memory: int | None = None  # bytes of each GPU, in place of the catalogue's
    context: int | None = None  # measured bytes on each GPU outside torch's allocator; None: estimated
    process: int | None = None  # measured bytes of host memory of a process before it loads; None: estimated
    half_cores: bool = False  # the CPU has kernels for bfloat16; else what it computes is widened to float32

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.ranks * self.nodes

    @property
    def device_memory(self) -> int:
        """Bytes of a rank's device; a CPU rank shares the node's memory."""
        if self.gpu is None:
            return self.host_memory
        return self.gpu_memory or self.gpu.usable


@dataclass(frozen=True)
class PlanRequest:
    """One question to the planner. Names are those of the flags of `wandistill train`."""

    model: Model
    student: WanArchitecture
    student_name: str
    machines: Machines
    width: int
    height: int
    frames: int = 1
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    teacher_dtype: str = "bfloat16"
    teacher_micro_batch: int = 0
    teacher_compile: bool = False
    guided: bool = True  # classifier-free guidance: both halves pass the teacher
    optimizer: str = "adamw"
    mixed_precision: str = "no"
    student_parallel: str = "ddp"
    ema_device: str = "none"  # gpu or cpu where there is an average
    gradient_checkpointing: bool = False
    features: bool = False  # block features are distilled: --feature_weight above 0
    embeddings: str = "cached"
    targets: str = "online"
    save_samples: bool = True
    checkpoints: int = 3  # on disk at once: those that are kept, and the one that is being written
    resident_blocks: int | None = None  # None: as many as spare time and find room
    stream_fetch: str = "auto"
    disk_buffer: int | None = None
    share_dir: bool = False  # the host copy is a file on a disk, which cannot be pinned
    max_memory: int | None = None
    teacher_rank: int = 0
    teacher_rank_trains: str = "auto"
    device_map: DeviceMap | None = None
    placement: str = "auto"
    memory_margin: float = MARGIN
    trains: bool = True  # False: only the caches are filled, as `wandistill prepare` does

    def __post_init__(self) -> None:
        for name, known in (
            ("teacher_dtype", TEACHER_DTYPES),
            ("optimizer", OPTIMIZERS),
            ("mixed_precision", ("no", "fp16", "bf16")),
            ("student_parallel", ("ddp", "fsdp")),
            ("ema_device", ("gpu", "cpu", "none")),
            ("targets", ("online", "cached")),
            ("stream_fetch", ("auto", "own", "split")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"--{name} {getattr(self, name)}: is not one of {', '.join(known)}.")
        for name in ("batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be at least 1.")
        if not 0 <= self.memory_margin < 1:
            raise ConfigError(f"--memory_margin {self.memory_margin}: must be at least 0 and below 1, such as 0.05.")

    def change(self, **changes: object) -> PlanRequest:
        """The same question with other settings."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def change_machines(self, **changes: object) -> PlanRequest:
        """The same question on other machines."""
        return replace(self, machines=replace(self.machines, **changes))  # type: ignore[arg-type]

    @cached_property
    def tokens(self) -> int:
        """Of one sample."""
        return self.model.tokens(self.width, self.height, self.frames)

    @property
    def on_gpu(self) -> bool:
        """Whether the student trains on GPUs."""
        return self.machines.gpu is not None

    @property
    def teacher_rows(self) -> int:
        """Rows of the teacher's batch for one micro-batch, both halves of guidance counted."""
        return self.batch_size * (2 if self.guided else 1)

    @property
    def teacher_piece(self) -> int:
        """Rows of one forward of the teacher."""
        return min(self.teacher_micro_batch or self.teacher_rows, self.teacher_rows)

    @property
    def half_weights(self) -> bool:
        """Whether the student's weights and gradients are bfloat16."""
        return self.optimizer != "adamw"

    @property
    def sharded_student(self) -> bool:
        """Whether the student is spread over the ranks."""
        return self.student_parallel == "fsdp" and self.machines.world > 1

    @property
    def student_compute(self) -> Compute:
        """Precision of the student's compute."""
        autocast = self.mixed_precision != "no"
        stored = 2 if self.half_weights else 4
        return Compute(stored, autocast, flash=self.on_gpu and (autocast or stored == 2))

    def teacher_pass(self, rows: int, compute: int) -> Pass:
        """A forward of the teacher with `rows` rows, in `compute` bytes an element."""
        model = self.model
        precision = Compute(compute, flash=self.on_gpu and compute == 2)
        return Pass(model.architecture, rows, self.tokens, model.token_length, precision, model.expand_timesteps)

    def student_pass(self, rows: int) -> Pass:
        """A forward of the student with `rows` rows."""
        model = self.model
        return Pass(self.student, rows, self.tokens, model.token_length, self.student_compute, model.expand_timesteps)

    @property
    def kept_features(self) -> int:
        """Blocks whose outputs are compared: all of the student's."""
        return self.student.num_layers if self.features else 0
