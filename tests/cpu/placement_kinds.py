"""The kinds of cases of the placements' suite: each is called on every rank of a world."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from delays import delayed, equal_steps
from engine_setup import resident
from placement_asks import answers, distance, steps
from placement_cases import Case
from placement_faults import FAULTS
from torch import Tensor

from wandistill.config import PLACEMENTS, from_mapping
from wandistill.device_map import unit_bytes
from wandistill.errors import WandistillError
from wandistill.models.student import build_student
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.student_config import student_spec
from wandistill.teacher import BUILDERS, DTYPES, Setting, compiled, pipeline, record_reader, sharded
from wandistill.teacher.base import Teacher, TeacherOutput
from wandistill.teacher.layout import Record
from wandistill.teacher.peer_memory import PeerMemory
from wandistill.train.batches import Sampler
from wandistill.train.distributed import World
from wandistill.train.loop import Loop
from wandistill.train.objectives import build_objective
from wandistill.train.student import TrainedStudent

STEPS = 10
DELAYED_STEPS = 100
# Graphs are captured as for any backend; compiling them on a CPU would take a C++ compiler, and a minute a rank.
compiled.BACKEND = "aot_eager"


class Ranks:
    """This rank's settings and references."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder  # of the teachers, and of what the ranks share
        self._teachers: dict[str, WanFolder] = {}
        self._expected: dict[str, list[TeacherOutput]] = {}

    def setting(self, case: Case) -> Setting:
        if case.teacher not in self._teachers:
            path = "embedded" if case.teacher == "embedded" else str(self.folder / case.teacher)
            self._teachers[case.teacher] = open_teacher(path)
        teacher = self._teachers[case.teacher]
        values = {"teacher_dtype": "float32", **case.settings}
        values |= self._variant(case, teacher.architecture.num_layers, values["teacher_dtype"])
        config = from_mapping(
            {
                "teacher_path": case.teacher,
                "output_dir": str(self.folder / "run"),
                "device": self.world.device.type,
                "batch_size": 2,
                "gradient_accumulation_steps": 2,
                # A placement that is registered by a test is no choice of the flag.
                "teacher_device_strategy": case.placement if case.placement in PLACEMENTS else "auto",
                **values,
            }
        )
        dtype = DTYPES.get(config.teacher_dtype, torch.int8)
        return Setting(config, teacher, dtype, self.world)

    def expected(self, case: Case, setting: Setting) -> list[TeacherOutput]:
        """What the resident teacher answers."""
        config = setting.config
        key = f"{case.teacher} {setting.dtype} {config.teacher_micro_batch} {config.teacher_compile}"
        if key not in self._expected:
            own = setting.dtype == torch.int8 or config.teacher_compile
            teacher = BUILDERS["gpu"](setting) if own else resident(setting)
            self._expected[key] = answers(teacher, steps(setting))
            teacher.close()
        return self._expected[key]

    def _variant(self, case: Case, layers: int, dtype: str) -> dict[str, Any]:
        ranks = self.world.size
        if case.variant == "last":
            return {"teacher_rank": ranks - 1}
        if case.variant == "split":
            return {"stream_fetch": "split"}
        if case.placement == "sequential" and case.variant != "first":
            sizes = parts_bytes(self._teachers[case.teacher], dtype)
            return {"max_memory": str(sum(sizes) // min(ranks, self.world.local_size) + max(sizes))}
        if case.placement == "custom":
            cut, last = (layers - 1) // 3, ranks - 1
            places = {f"0-{cut}": last, f"{cut + 1}-{layers - 2}": 0, f"{layers - 1}": last}
            if case.variant == "stored":
                places = {f"0-{cut}": "disk", f"{cut + 1}-{layers - 2}": last, f"{layers - 1}": "cpu"}
            if case.variant == "outer":
                places = {"patch_embedding": 0, f"0-{layers - 1}": last, "proj_out": "disk", "norm_out": "disk"}
            path = self.folder / f"map {self.world.size} {layers} {case.variant}.yaml"
            if self.world.is_main:
                path.write_text("".join(f"{key}: {value}\n" for key, value in places.items()), encoding="utf-8")
            self.world.barrier()
            return {"teacher_device_map": str(path)}
        return {}


def parts_bytes(folder: WanFolder, dtype: str) -> list[int]:
    return unit_bytes(folder.architecture, dtype, len(folder.experts))


@contextmanager
def placed(case: Case, setting: Setting) -> Iterator[Teacher]:
    """The teacher of a case, with its fault, closed in the end."""
    with FAULTS[case.fault]():
        share = patch.object(sharded, "peer_memory", mapped_memory) if case.variant == "peers" else FAULTS[""]()
        with share:
            teacher = BUILDERS[case.placement](setting)
        torch.set_num_threads(1)  # equal bits are promised for equally many threads
        try:
            yield teacher
        finally:
            teacher.close()


def mapped_memory(size: int, world: World, transport: Any) -> PeerMemory:
    """What symmetric memory is on GPUs, of files that all ranks map."""
    paths = world.gather(f"/dev/shm/wandistill-test-{os.getpid()}")
    own = torch.from_file(paths[world.rank], shared=True, size=size, dtype=torch.uint8)
    world.barrier()
    members = [torch.from_file(paths[rank], shared=True, size=size, dtype=torch.uint8) for rank in transport.members]
    world.barrier()
    os.unlink(paths[world.rank])
    return PeerMemory(own, members)


# What each kind returns is one rank's finding.


def targets(case: Case, ranks: Ranks) -> dict[str, Any]:
    """How far the answers are from the resident teacher's."""
    setting = ranks.setting(case)
    expected = ranks.expected(case, setting)
    with placed(case, setting) as teacher:
        return {"distance": distance(answers(teacher, steps(setting)), expected)}


def losses(case: Case, ranks: Ranks) -> dict[str, Any]:
    """The losses of a short run, and of the same run with the resident teacher."""
    setting = ranks.setting(case)
    with placed(case, setting) as teacher:
        return {"losses": train(setting, teacher), "expected": resident_losses(setting)}


def memory(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Bytes of the teacher that this rank read, and those of the whole teacher."""
    setting = ranks.setting(case)
    read = record_reader.RecordReader.read
    sizes: list[int] = []

    def counted(self: record_reader.RecordReader, record: Record, buffer: Tensor) -> None:
        sizes.append(self._layout.layout_of(record).size)
        read(self, record, buffer)

    with patch.object(record_reader.RecordReader, "read", counted), placed(case, setting):
        return {"bytes": sum(sizes), "whole": sum(parts_bytes(setting.folder, "float32"))}


def served(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Rank 0 computes and asks nothing, until the others close."""
    setting = ranks.setting(case)
    expected = ranks.expected(case, setting)
    with placed(case, setting) as teacher:
        if ranks.world.rank == setting.config.teacher_rank:
            assert isinstance(teacher, pipeline.PipelineTeacher)
            teacher.serve()
            return {"distance": 0.0}
        return {"distance": distance(answers(teacher, steps(setting)), expected)}


def delays(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Steps that equal the resident teacher's while copies and compute are late, on each rank at other times."""
    setting = ranks.setting(case)
    reference = resident(setting)
    with placed(case, setting) as teacher, delayed(setting.world.device, seed=ranks.world.rank):
        return {"equal": list(equal_steps(setting.folder, teacher, reference, DELAYED_STEPS))}


def disagreement(case: Case, ranks: Ranks) -> dict[str, Any]:
    """The ranks ask different experts."""
    setting = ranks.setting(case)
    with placed(case, setting) as teacher:
        ask = steps(setting)[0][0]
        try:
            expert = setting.folder.experts[ranks.world.rank % 2]
            teacher.result(teacher.request(ask.x, ask.t, ask.prompt, expert, ask.guidance, ask.features))
        except WandistillError as error:
            return {"said": str(error)}
        return {"said": ""}


class RandomData:
    """Latents and prompts of a run."""

    def __init__(self, setting: Setting) -> None:
        size = 2 * setting.folder.spatial_factor * setting.folder.architecture.patch_size[1]
        shape = setting.folder.latent_shape(size, size)
        generator = torch.Generator().manual_seed(5)
        self._latents = torch.randn(24, *shape, generator=generator)
        self._prompts = torch.randn(24, 5, setting.folder.architecture.text_dim, generator=generator)
        self.negative = torch.randn(1, 5, setting.folder.architecture.text_dim, generator=generator)

    def __len__(self) -> int:
        return len(self._latents)

    def batch(self, items: list[int]) -> tuple[Tensor, Tensor]:
        return self._latents[items], self._prompts[items]

    def states(self, items: list[int], draws: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("no targets are cached")


def train(setting: Setting, teacher: Teacher) -> list[float]:
    """The losses of a run; its last step has fewer samples than the others."""
    config, folder, world = setting.config, setting.folder, setting.world
    spec = student_spec("half", folder.architecture)
    objective = build_objective("velocity", 0.5, spec.blocks)
    pairs = list(zip(objective.student_blocks, objective.teacher_blocks, strict=True))
    student = TrainedStudent(build_student(folder, spec, "low", feature_pairs=pairs, placed=teacher), config, world)
    samples = STEPS * config.batch_size * config.gradient_accumulation_steps * world.size - 3
    sampler = Sampler(
        config, world, RandomData(setting), total_samples=samples, boundary=folder.boundary, shift=folder.flow_shift
    )
    found: list[float] = []
    loop = Loop(
        config,
        world,
        student,
        teacher,
        sampler,
        objective,
        total_steps=STEPS,
        on_step=lambda step, figures, expert: found.append(figures["loss"]),
        on_nonfinite=lambda: None,
        is_pause=lambda step: step == STEPS,
        on_pause=lambda step, last: None,
    )
    loop.run(0)
    return found


_resident_losses: dict[str, list[float]] = {}


def resident_losses(setting: Setting) -> list[float]:
    name = setting.folder.name
    if name not in _resident_losses:
        _resident_losses[name] = train(setting, BUILDERS["gpu"](setting))
    return _resident_losses[name]


KINDS: dict[str, Callable[[Case, Ranks], dict[str, Any]]] = {
    "targets": targets,
    "losses": losses,
    "memory": memory,
    "served": served,
    "delays": delays,
    "disagreement": disagreement,
}
