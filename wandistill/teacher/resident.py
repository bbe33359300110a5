"""Placements `gpu` and `cpu`: a rank's own copy of the teacher, computed where it lies."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wandistill.models.forward import embed, run_blocks, unembed
from wandistill.teacher.base import Expert, Prompt, Request, TeacherOutput

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel


class ResidentTeacher:
    """Whole experts on one device; x may come from another, and answers go back to it.

    Args:
        models: the experts, frozen.
        device: where they lie and compute.
        expand_timesteps: one timestep per token (Wan2.2-TI2V-5B).
        micro_batch: most samples in one forward, both halves of guidance counted; 0: all at once.

    A half dtype on a CPU without kernels for it is a storage dtype: blocks are widened to float32 one at a time,
    since emulated half arithmetic is 10 to 500 times slower.
    """

    def __init__(
        self,
        models: Mapping[Expert, WanTransformer3DModel],
        device: torch.device,
        *,
        expand_timesteps: bool = False,
        micro_batch: int = 0,
    ) -> None:
        self._models = {
            expert: _WidenedModel(model) if needs_widening(model, device) else model.to(device)
            for expert, model in models.items()
        }
        self._device = device
        self._expand_timesteps = expand_timesteps
        self._micro_batch = micro_batch

    def request(
        self, x: Tensor, t: Tensor, prompt: Prompt, expert: Expert, guidance: float, features: Sequence[int] = ()
    ) -> Request:
        """The request itself is the ticket: nothing starts before `result`."""
        return Request(x, t, prompt, expert, guidance, tuple(features))

    @torch.no_grad()
    def result(self, ticket: Request) -> TeacherOutput:
        """Computes the answer."""
        inputs = [tensor.to(self._device, non_blocking=True) for tensor in ticket.model_inputs()]
        model = self._models[ticket.expert]
        step = self._micro_batch or len(inputs[0])
        pieces = [
            self._forward(model, x, t, prompt, ticket.features)
            for x, t, prompt in zip(*(tensor.split(step) for tensor in inputs), strict=True)
        ]
        velocity = torch.cat([piece for piece, _ in pieces])
        features = {index: torch.cat([kept[index] for _, kept in pieces]) for index in ticket.features}
        return ticket.output(velocity, features)

    def _forward(
        self,
        model: WanTransformer3DModel | _WidenedModel,
        x: Tensor,
        t: Tensor,
        prompt: Tensor,
        features: Sequence[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        outer = model.outer if isinstance(model, _WidenedModel) else model
        blocks: Iterable[nn.Module] = model.blocks
        state = embed(outer, x, t, prompt, expand_timesteps=self._expand_timesteps)
        state, kept = run_blocks(blocks, state, features)
        return unembed(outer, state), kept

    def close(self) -> None:
        """Frees the weights."""
        self._models.clear()


class _WidenedModel:
    """A half-precision model computed in float32: what is outside the blocks is kept wide, a block is widened when
    its turn comes."""

    def __init__(self, model: WanTransformer3DModel) -> None:
        self._blocks = model.blocks
        model.blocks = nn.ModuleList()
        self.outer = model.float()
        self._wide_block = copy.deepcopy(self._blocks[0]).float()

    @property
    def blocks(self) -> Iterator[nn.Module]:
        """The blocks in order; each is valid until the next is taken."""
        for block in self._blocks:
            for wide, stored in zip(self._wide_block.parameters(), block.parameters(), strict=True):
                wide.copy_(stored)
            yield self._wide_block


def needs_widening(model: WanTransformer3DModel, device: torch.device) -> bool:
    """Whether `model` is stored in a dtype that `device` cannot compute fast."""
    return device.type == "cpu" and not cpu_computes(next(model.patch_embedding.parameters()).dtype)


def cpu_computes(dtype: torch.dtype) -> bool:
    """Whether this CPU has kernels for `dtype`: bfloat16 needs AVX512-BF16 or AMX; float16 is never fast on it."""
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return dtype == torch.float32
