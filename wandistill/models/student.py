"""The student: a smaller Wan made of a teacher's blocks, for the whole of t whatever the teacher's experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from wandistill.errors import ConfigError
from wandistill.models.forward import forward
from wandistill.models.weights import TransformerFiles, empty_transformer, read_mean
from wandistill.models.width import Cut, Importance, measure_importance
from wandistill.student_config import INITS, StudentSpec
from wandistill.teacher.base import Expert, Teacher

if TYPE_CHECKING:
    from wandistill.models.wan import WanFolder

# Candidates of `--init auto`, in the order in which the first of equals wins.
MEASURED_INITS = ("low", "average", "high")


class ProbeBatch(NamedTuple):
    """A few noisy latents with the teacher's answer, to measure importance and initialisations with."""

    x: Tensor  # [B, C, F, H, W]
    t: Tensor  # times in 0..1 [B]
    prompt: Tensor  # [B, L, E]
    velocity: Tensor  # [B, C, F, H, W], the target, guided if the run's targets are


class Student(nn.Module):
    """A Wan transformer, and a projection of each distilled feature to the teacher's width where widths differ."""

    def __init__(
        self, transformer: WanTransformer3DModel, projections: Mapping[int, nn.Linear], *, expand_timesteps: bool
    ) -> None:
        super().__init__()
        self.transformer = transformer
        self.projections = nn.ModuleDict({str(block): layer for block, layer in projections.items()})
        self.expand_timesteps = expand_timesteps
        self.gradient_checkpointing = False

    @property
    def float32_names(self) -> frozenset[str]:
        """Parts of parameter names (between dots) by which diffusers knows what Wan keeps in float32."""
        return frozenset(WanTransformer3DModel._keep_in_fp32_modules)

    def forward(
        self, x: Tensor, t: Tensor, prompt: Tensor, features: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Velocity and features.

        Args:
            x: noisy latents [B, C, F, H, W].
            t: times in 0..1 [B].
            prompt: prompt embeddings [B, L, E].
            features: student blocks whose outputs are wanted.

        Returns:
            The velocity [B, C, F, H, W], and each feature [B, N, teacher's D] in the order asked for.
        """
        velocity, kept = forward(
            self.transformer,
            x,
            t,
            prompt,
            features,
            expand_timesteps=self.expand_timesteps,
            gradient_checkpointing=self.gradient_checkpointing,
        )
        return velocity, [self._project(block, kept[block]) for block in features]

    def _project(self, block: int, feature: Tensor) -> Tensor:
        key = str(block)
        return self.projections[key](feature) if key in self.projections else feature


def empty_student(folder: WanFolder, spec: StudentSpec, *, feature_pairs: Sequence[tuple[int, int]] = ()) -> Student:
    """The student with its parameters on the meta device, for weights that come from elsewhere (a checkpoint).

    Args:
        folder: the teacher.
        spec: the student.
        feature_pairs: (student block, teacher block) of each distilled feature.
    """
    with torch.device("meta"):
        projections = _projections(folder, spec, feature_pairs)
    transformer = empty_transformer(student_config(folder, spec))
    return Student(transformer, projections, expand_timesteps=folder.expand_timesteps)


def build_student(
    folder: WanFolder,
    spec: StudentSpec,
    init: str,
    *,
    feature_pairs: Sequence[tuple[int, int]] = (),
    importance: Importance | None = None,
    seed: int = 0,
    placed: Teacher | None = None,
) -> Student:
    """The student with its first weights, float32 on the CPU; the same bits on every call.

    The teacher's weights are taken tensor by tensor, and only those that the student has: from the files, or where a
    placed teacher has the same numbers in this node's memory from there, so that the disk gives them once.

    Args:
        folder: the teacher.
        spec: the student.
        init: low, average or high: the expert that weights come from (a teacher with one expert: that one); or random.
        feature_pairs: (student block, teacher block) of each distilled feature.
        importance: what decides which heads and channels a narrower student keeps; see `wandistill.models.width`.
        seed: of what is drawn at random: the feature projections, and everything under random.
        placed: the teacher at its place, if it is there already; the student keeps nothing of it.

    Raises:
        ConfigError: a tensor that the student needs is not in the teacher's files.
        ValueError: a narrower student without an importance, or an init that is to be measured first.
    """
    if init not in INITS or init == "auto":
        raise ValueError(f"init {init!r} must be low, average, high or random here")
    student = empty_student(folder, spec, feature_pairs=feature_pairs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = nn.ModuleDict({str(k): layer for k, layer in _projections(folder, spec, feature_pairs).items()})
        student.projections.load_state_dict(drawn.state_dict(), assign=True)
        if init == "random":
            transformer = WanTransformer3DModel.from_config(student_config(folder, spec))
            student.transformer.load_state_dict(transformer.state_dict(), assign=True)
            return student
    narrow = spec.narrower_than(folder.architecture)
    if narrow and importance is None:
        raise ValueError("a narrower student needs an importance to choose its heads and channels by")
    cut = Cut(importance, spec.architecture, folder.architecture, spec.blocks) if narrow and importance else None
    sources = [
        TransformerFiles(folder.path / expert.value, partial(placed.weight, expert) if placed is not None else None)
        for expert in init_experts(folder, init)
    ]
    weights = {}
    for name in student.transformer.state_dict():
        tensor = read_mean(sources, _teacher_name(name, spec))
        weights[name] = cut(name, tensor).contiguous() if cut else tensor
    student.transformer.load_state_dict(weights, assign=True)
    return student


def init_experts(folder: WanFolder, init: str) -> tuple[Expert, ...]:
    """The experts that `init` takes weights from."""
    return {"high": folder.experts[:1], "low": folder.experts[-1:], "average": folder.experts}[init]


def student_config(folder: WanFolder, spec: StudentSpec) -> dict[str, Any]:
    """The config.json of the student's transformer: the teacher's, with the student's depth and width."""
    shape = spec.architecture
    return {
        **folder.transformer_config,
        "num_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "attention_head_dim": shape.attention_head_dim,
        "ffn_dim": shape.ffn_dim,
    }


def importance_of(
    folder: WanFolder,
    spec: StudentSpec,
    init: str,
    batches: Sequence[ProbeBatch],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Importance | None:
    """What a student started by `init` chooses its heads and channels by; None if it is as wide as the teacher.

    Each expert is measured on the samples of its own range of t, with one of its blocks on the device at a time: the
    teacher may be one that the device has no room for.

    Raises:
        ConfigError: no sample lies in the range of an expert that is needed.
    """
    if init == "random" or not spec.narrower_than(folder.architecture):
        return None
    total: Importance | None = None
    for expert in init_experts(folder, init):
        own = [part for batch in batches if (part := _samples_of(folder, expert, batch)) is not None]
        if not own:
            raise ConfigError(
                f"no cached sample has a t in the range of {expert.value}, so the importance of its channels cannot "
                "be measured; cache more rollouts."
            )
        measured = _importance(folder, expert, own, spec.blocks, dtype, device)
        total = measured if total is None else total + measured
    return total


def _importance(
    folder: WanFolder,
    expert: Expert,
    batches: Sequence[tuple[Tensor, Tensor, Tensor]],
    blocks: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Importance:
    model, files = empty_transformer(folder.transformer_config), TransformerFiles(folder.path / expert.value)
    model.rope.to(device)
    kept = frozenset(WanTransformer3DModel._keep_in_fp32_modules)

    def read(names: Iterable[str], prefix: str = "") -> dict[str, Tensor]:
        dtypes = {name: dtype if kept.isdisjoint(name.split(".")) else torch.float32 for name in names}
        return {name: files.read(prefix + name, wanted).to(device) for name, wanted in dtypes.items()}

    outer = [name for name in model.state_dict() if not name.startswith("blocks.")]
    model.load_state_dict(read(outer), strict=False, assign=True)
    return measure_importance(
        model.eval().requires_grad_(False),
        batches,
        blocks,
        expand_timesteps=folder.expand_timesteps,
        read_block=lambda index: read(model.blocks[index].state_dict(), f"blocks.{index}."),
    )


@torch.no_grad()
def choose_init(
    folder: WanFolder,
    spec: StudentSpec,
    batches: Sequence[ProbeBatch],
    *,
    importances: Mapping[str, Importance | None] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[str, dict[str, float]]:
    """The initialisation whose untrained student is nearest to the teacher, and the error of each.

    The error is the relative L2 distance of velocities over all samples of `batches`, which should spread over the
    whole of t. A teacher with one expert has one initialisation, low.

    Args:
        folder: the teacher.
        spec: the student.
        batches: inputs with the teacher's targets.
        importances: for a narrower student, by initialisation; see `importance_of`.
        device: where the students compute.
    """
    errors = {}
    for init in MEASURED_INITS[:1] if len(folder.experts) == 1 else MEASURED_INITS:
        student = build_student(folder, spec, init, importance=(importances or {}).get(init)).to(device).eval()
        errors[init] = velocity_error(student, batches, device)
        del student
    return min(errors, key=lambda init: errors[init]), errors


def velocity_error(student: Student, batches: Iterable[ProbeBatch], device: torch.device | str) -> float:
    """Relative L2 distance of the student's velocities to the targets over all samples."""
    wrong = total = 0.0
    for batch in batches:
        velocity, _ = student(batch.x.to(device), batch.t.to(device), batch.prompt.to(device))
        target = batch.velocity.to(device).float()
        wrong += float((velocity.float() - target).square().sum())
        total += float(target.square().sum())
    return (wrong / total) ** 0.5


def _projections(
    folder: WanFolder, spec: StudentSpec, feature_pairs: Sequence[tuple[int, int]]
) -> dict[int, nn.Linear]:
    own, teachers = spec.architecture.hidden_size, folder.architecture.hidden_size
    if own == teachers:
        return {}
    return {block: nn.Linear(own, teachers) for block, _ in feature_pairs}


def _teacher_name(name: str, spec: StudentSpec) -> str:
    """The teacher's name of the tensor that the student's `name` starts from."""
    if not name.startswith("blocks."):
        return name
    _, index, rest = name.split(".", 2)
    return f"blocks.{spec.blocks[int(index)]}.{rest}"


def _samples_of(folder: WanFolder, expert: Expert, batch: ProbeBatch) -> tuple[Tensor, Tensor, Tensor] | None:
    own = torch.tensor([folder.expert_for(t) == expert for t in batch.t.tolist()])
    return (batch.x[own], batch.t[own], batch.prompt[own]) if own.any() else None
