"""Placement `gpu`: a rank's own copy of the teacher, computed where it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wandistill.models.forward import forward
from wandistill.models.held import hold
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
    """

    def __init__(
        self,
        models: Mapping[Expert, WanTransformer3DModel],
        device: torch.device,
        *,
        expand_timesteps: bool = False,
        micro_batch: int = 0,
    ) -> None:
        self._models = {expert: model.to(device) for expert, model in models.items()}
        for model in self._models.values():
            hold("teacher", [*model.parameters(), *model.buffers()])
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
            forward(model, x, t, prompt, ticket.features, expand_timesteps=self._expand_timesteps)
            for x, t, prompt in zip(*(tensor.split(step) for tensor in inputs), strict=True)
        ]
        velocity = torch.cat([piece for piece, _ in pieces])
        features = {index: torch.cat([kept[index] for _, kept in pieces]) for index in ticket.features}
        return ticket.output(velocity, features)

    def weight(self, expert: Expert, name: str) -> Tensor | None:
        """None: the files are read."""
        return None

    def close(self) -> None:
        """Frees the weights."""
        self._models.clear()


def cpu_computes(dtype: torch.dtype) -> bool:
    """Whether this CPU has kernels for `dtype`: bfloat16 needs AVX512-BF16 or AMX; float16 is never fast on it."""
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return dtype == torch.float32
