"""What the tests of the block engine share: settings, requests, the resident reference, larger random teachers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wandistill.config import from_mapping
from wandistill.models.wan import WanFolder
from wandistill.teacher import BUILDERS, Setting
from wandistill.teacher.base import Expert, Prompt, Teacher, TeacherOutput
from wandistill.teacher.layout import Precision
from wandistill.teacher.resident import ResidentTeacher
from wandistill.train.distributed import World

if TYPE_CHECKING:
    import torch

ENGINE = ("cpu", "offload", "stream", "disk")


@dataclass(frozen=True)
class Ask:
    """Arguments of one request."""

    x: torch.Tensor
    t: torch.Tensor
    prompt: Prompt
    expert: Expert
    guidance: float = 4.0
    features: tuple[int, ...] = ()


def asks(
    folder: WanFolder,
    experts: Sequence[Expert] | None = None,
    *,
    batch: int = 2,
    guidance: float = 4.0,
    features: tuple[int, ...] = (),
    seed: int = 0,
) -> list[Ask]:
    """One request for each of `experts` (all of the teacher, in turn, if none are given), of 2 x 2 tokens."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    size = 2 * folder.spatial_factor * folder.architecture.patch_size[1]
    latents = folder.latent_shape(size, size)
    width = folder.architecture.text_dim

    def one(expert: Expert) -> Ask:
        prompt = Prompt(
            torch.randn(batch, 5, width, generator=generator), torch.randn(1, 5, width, generator=generator)
        )
        x = torch.randn(batch, *latents, generator=generator)
        return Ask(x, torch.rand(batch, generator=generator), prompt, expert, guidance, features)

    return [one(expert) for expert in (experts or folder.experts)]


def setting(folder: WanFolder, output_dir: Path, dtype: torch.dtype | None = None, **values: Any) -> Setting:
    """A run's setting in a world of one rank on the CPU; float32 unless told."""
    import torch

    config = from_mapping({"output_dir": str(output_dir), **values})
    return Setting(config, folder, dtype or torch.float32, World(0, 1, 0, 1, torch.device("cpu")))


def place(name: str, of: Setting) -> Teacher:
    """The teacher at placement `name`."""
    return BUILDERS[name](of)


def resident(of: Setting) -> ResidentTeacher:
    """The reference: whole experts in memory, loaded by diffusers; in float32 where the device computes so."""
    import torch

    models = {expert: of.folder.load_transformer(expert, of.dtype, "cpu") for expert in of.folder.experts}
    if Precision.of(of.dtype, of.world.device).compute == torch.float32:
        models = {expert: model.float() for expert, model in models.items()}
    return ResidentTeacher(
        models,
        of.world.device,
        expand_timesteps=of.folder.expand_timesteps,
        micro_batch=of.config.teacher_micro_batch,
    )


def answers(teacher: Teacher, requests: Iterable[Ask]) -> list[TeacherOutput]:
    """The answers to requests that all wait together."""
    tickets = [teacher.request(r.x, r.t, r.prompt, r.expert, r.guidance, r.features) for r in requests]
    return [teacher.result(ticket) for ticket in tickets]


def same(ours: Sequence[TeacherOutput], theirs: Sequence[TeacherOutput]) -> bool:
    """Whether all velocities and features are equal to the bit."""
    import torch

    return len(ours) == len(theirs) and all(
        torch.equal(a.velocity, b.velocity)
        and a.features.keys() == b.features.keys()
        and all(torch.equal(hidden, b.features[block]) for block, hidden in a.features.items())
        for a, b in zip(ours, theirs, strict=True)
    )


def enlarge(folder: Path, *, shard: str = "1GB", dtype: torch.dtype | None = None, **sizes: int) -> Path:
    """Gives the teacher in `folder` random transformers of other sizes, float32 unless told, in shards of `shard`."""
    import torch
    from diffusers import WanTransformer3DModel

    for component in ("transformer", "transformer_2"):
        if (folder / component).is_dir():
            config = WanTransformer3DModel.load_config(folder / component)
            shutil.rmtree(folder / component)
            model = WanTransformer3DModel.from_config({**config, **sizes}).to(dtype or torch.float32)
            model.save_pretrained(folder / component, max_shard_size=shard)
    return folder


def write_random(folder: Path, *, dtype: torch.dtype | None = None, **sizes: int) -> Path:
    """Gives the teacher in `folder` random transformers of other sizes, float32 unless told, a shard for each block.

    Larger than the memory, if need be: one block is drawn, and rolled for each, so that no two are alike.
    """
    import torch

    from wandistill.models.weights import empty_transformer

    for component in ("transformer", "transformer_2"):
        path = folder / component
        if not path.is_dir():
            continue
        config = {**json.loads((path / "config.json").read_text(encoding="utf-8")), **sizes}
        shutil.rmtree(path)
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        drawn = {
            name: torch.randn(parameter.shape).mul_(0.02).to(dtype or torch.float32)
            for name, parameter in empty_transformer({**config, "num_layers": 1}).named_parameters()
        }
        outer = {name: tensor for name, tensor in drawn.items() if not name.startswith("blocks.")}
        block = {name.removeprefix("blocks.0."): tensor for name, tensor in drawn.items() if name not in outer}
        count = config["num_layers"] + 1
        # A few at a time: rolling and writing take as long as each other.
        with ThreadPoolExecutor(4) as pool:
            written = list(pool.map(partial(_write_shard, path, outer, block, count), range(count)))
        places = {name: file for file, names in written for name in names}
        index = {"metadata": {}, "weight_map": places}
        (path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _write_shard(
    path: Path, outer: dict[str, torch.Tensor], block: dict[str, torch.Tensor], count: int, number: int
) -> tuple[str, list[str]]:
    """Writes a shard of `count`: the first is what lies outside the blocks. Returns its file and what it holds."""
    from safetensors.torch import save_file

    rolled = {f"blocks.{number - 1}.{name}": tensor.roll(number) for name, tensor in block.items()}
    shard = rolled if number else outer
    file = f"diffusion_pytorch_model-{number + 1:05d}-of-{count:05d}.safetensors"
    save_file(shard, path / file)
    return file, list(shard)
