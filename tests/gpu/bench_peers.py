"""Other ways to keep a frozen teacher, that the benchmark puts beside the placements: diffusers, accelerate, FSDP2.

Each is used as its documentation says, on diffusers' own model and forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from tests.gpu.bench_measure import Ask, Forward
from wandistill.teacher import Setting
from wandistill.teacher.base import Expert


def _load(setting: Setting, device: torch.device | str) -> WanTransformer3DModel:
    return setting.folder.load_transformer(Expert.HIGH, setting.dtype, device)


def _forward(model: WanTransformer3DModel, dtype: torch.dtype) -> Forward:
    def forward(ask: Ask) -> Tensor:
        prompt = ask.prompt.positive.to(dtype)
        return model(ask.x.to(dtype), ask.t * 1000.0, prompt, return_dict=False)[0].float()

    return forward


@contextmanager
def group_offload(setting: Setting) -> Iterator[Forward]:
    """diffusers' group offloading, a block at a time, the next one copied on a stream."""
    from diffusers.hooks import apply_group_offloading

    device = setting.world.device
    model = _load(setting, "cpu")
    stream = device.type == "cuda"
    apply_group_offloading(
        model,
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=stream,
        record_stream=stream,
    )
    yield _forward(model, setting.dtype)


@contextmanager
def accelerate_offload(setting: Setting) -> Iterator[Forward]:
    """accelerate's cpu_offload: each module's weights are copied when it is called."""
    from accelerate import cpu_offload

    model = cpu_offload(_load(setting, "cpu"), execution_device=setting.world.device)
    yield _forward(model, setting.dtype)


@contextmanager
def fsdp(setting: Setting) -> Iterator[Forward]:
    """FSDP2, every block sharded over the ranks."""
    yield from _sharded(setting, offload=False)


@contextmanager
def fsdp_offload(setting: Setting) -> Iterator[Forward]:
    """FSDP2 with its shards in pinned host memory."""
    yield from _sharded(setting, offload=True)


def _sharded(setting: Setting, *, offload: bool) -> Iterator[Forward]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    world = setting.world
    mesh = init_device_mesh(world.device.type, (world.size,))
    # Pinning needs a GPU.
    policy = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offload else OffloadPolicy()
    model = _load(setting, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
    yield _forward(model, setting.dtype)


PEERS: dict[str, Callable[[Setting], object]] = {
    "diffusers-group-offload": group_offload,
    "accelerate-cpu-offload": accelerate_offload,
    "fsdp2": fsdp,
    "fsdp2-cpu-offload": fsdp_offload,
}
