"""The student's optimizers and its averaged weights."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wandistill.train.schedule import stream_seed

BETAS = (0.9, 0.99)

# Optimizers that train half-precision weights; they round stochastically, so that small updates are not lost.
HALF_WEIGHTS = ("adamw_bf16", "adamw8bit")


def half_weights(module: nn.Module, keep: Iterable[str]) -> nn.Module:
    """Casts `module` to bfloat16, except parameters whose name contains one of `keep` (Wan's float32 parts)."""
    keep = tuple(keep)
    for name, parameter in module.named_parameters():
        if not any(part in name.split(".") for part in keep):
            parameter.data = parameter.data.to(torch.bfloat16)
    return module


def build_optimizer(
    name: str, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW by name: `adamw` (float32), `adamw_bf16` or `adamw8bit` (torchao, 8-bit moments in blocks of 256)."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if name == "adamw":
        # torch's choice on a GPU, foreach, holds the square roots of all second moments at once: 4 B a parameter.
        fused = parameters[0].is_cuda or None
        return torch.optim.AdamW(parameters, lr=lr, betas=BETAS, weight_decay=weight_decay, fused=fused)
    from torchao.optim import AdamW8bit
    from torchao.optim.adam import _AdamW

    kind = _on_shards(AdamW8bit if name == "adamw8bit" else _AdamW)
    return kind(parameters, lr=lr, betas=BETAS, weight_decay=weight_decay, bf16_stochastic_round=True)


@cache
def _on_shards(kind: Any) -> Any:
    """torchao's optimizer `kind` with a step in which each rank computes on its own part of a sharded parameter:
    DTensor's dispatch cannot pass 8-bit moments. The states stay DTensors, so that checkpoints know their places.

    Parameters go in as rows of one length: a graph for each shape of a Wan, of which there are some 20, takes a minute
    to compile; rows of any number share one."""
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    def rows(tensor: Tensor, like: Tensor) -> Tensor:
        """The values in rows of a block, if moment `like` is kept in 8-bit blocks, else in one row."""
        part, moment = local(tensor), local(like)
        if isinstance(part, OptimState8bit):  # a view, as a DTensor holds it, cannot be traced
            return OptimState8bit(rows(part.codes, like), part.scale, part.qmap, part.signed, part.dtype)
        return part.view(-1, moment.block_size) if isinstance(moment, OptimState8bit) else part.view(-1)

    class OnShards(kind):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            fused = torch.compile(single_param_adam, fullgraph=True, dynamic=True)
            # A few more graphs, where a number of rows is equal to another size; dynamo's limit, 8, is an error here.
            with torch._dynamo.utils.disable_cache_limit():
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is None:
                            continue
                        state = self.state[p]
                        if not state:
                            state["step"] = torch.tensor(0.0)
                            state["exp_avg"] = self._new_buffer(p, signed=True)
                            state["exp_avg_sq"] = self._new_buffer(p, signed=False)
                        state["step"] += 1
                        # On a CPU compiling would take a C++ compiler.
                        update = fused if p.device.type == "cuda" else single_param_adam
                        moment = state["exp_avg"]
                        update(
                            rows(p.detach(), moment),
                            rows(p.grad, moment),
                            state["step"],
                            rows(moment, moment),
                            rows(state["exp_avg_sq"], moment),
                            None,
                            group["lr"],
                            *group["betas"],
                            group["weight_decay"],
                            group["eps"],
                            self.is_adamw,
                            self.bf16_stochastic_round and p.dtype is torch.bfloat16,
                        )

    return OnShards


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets `lr` in every group; torchao's optimizers hold it in a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def seed_rounding(seed: int, step: int) -> None:
    """Seeds the generators that stochastic rounding draws from: the same on all ranks, and after a resume."""
    torch.manual_seed(stream_seed(seed, "rounding", step))


class Average:
    """Exponential moving average of a module's parameters, in float32 on a device of its own choice.

    The decay rises as min(decay, (1 + step) / (10 + step)), so that early steps do not hold the start's weights.
    """

    def __init__(self, module: nn.Module, decay: float, device: torch.device) -> None:
        self._decay = decay
        self.weights = {
            name: parameter.detach().float().to(device, copy=True) for name, parameter in module.named_parameters()
        }

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """Moves the average towards the parameters after optimizer step `step` (from 0)."""
        weight = 1 - min(self._decay, (1 + step) / (10 + step))
        for name, parameter in module.named_parameters():
            average = local(self.weights[name])
            average.lerp_(local(parameter.detach()).to(average.device, torch.float32), weight)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; another as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
