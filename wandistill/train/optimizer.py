"""The student's optimizers and its averaged weights."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wandistill.planner.updates import JOINED, ROW
from wandistill.train.schedule import stream_seed

BETAS = (0.9, 0.99)

# Optimizers that train half-precision weights; they round stochastically, so that small updates are not lost.
HALF_WEIGHTS = ("adamw_bf16", "adamw8bit")


def compiles(device: torch.device) -> bool:
    """Whether updates are compiled: on a CPU that would take a C++ compiler."""
    return device.type == "cuda"


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


class _Update(NamedTuple):
    """What one update reads and writes, this rank's part: of a parameter on its own, or of small ones joined."""

    parameter: Tensor
    gradient: Tensor
    step: Tensor
    first: Tensor  # moments
    second: Tensor

    @property
    def kind(self) -> tuple[object, ...]:
        """Updates of one kind may be joined."""
        return self.parameter.dtype, type(self.first), self.first.dtype, self.step.item()


def _together(updates: Iterable[_Update]) -> list[list[_Update]]:
    """Those of small parameters, by kind, in rows that are no longer than `ROW`."""
    rows: list[list[_Update]] = []
    last: dict[object, tuple[list[_Update], int]] = {}
    for update in updates:
        size = update.parameter.numel()
        if size >= JOINED:
            continue
        kind = update.kind
        row, length = last.get(kind, ([], ROW))
        if length + size > ROW:
            row, length = [], 0
            rows.append(row)
        row.append(update)
        last[kind] = row, length + size
    return rows


@cache
def _on_shards(kind: Any) -> Any:
    """torchao's optimizer `kind` with a step in which each rank computes on its own part of a sharded parameter:
    DTensor's dispatch cannot pass 8-bit moments. The states stay DTensors, so that checkpoints know their places.

    Parameters go in as rows of one length: a graph for each shape of a Wan, of which there are some 20, takes a minute
    to compile; rows of any number share one. Calling what is compiled takes the host longer than a small parameter
    takes a GPU: those, two thirds of a Wan's, are copied together up to a row's length, updated, and copied back.
    """
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    fused = torch.compile(single_param_adam, fullgraph=True, dynamic=True)

    def rows(tensor: Any, moment: Any) -> Any:
        """The values in rows of a block, if `moment` is kept in 8-bit blocks, else in one row."""
        if isinstance(tensor, OptimState8bit):  # a view, as a DTensor holds it, cannot be traced
            return OptimState8bit(rows(tensor.codes, moment), tensor.scale, tensor.qmap, tensor.signed, tensor.dtype)
        return tensor.view(-1, moment.block_size) if isinstance(moment, OptimState8bit) else tensor.view(-1)

    def joined(tensors: list[Any]) -> Any:
        """A copy of all in one row."""
        first = tensors[0]
        if isinstance(first, OptimState8bit):
            codes, scale = joined([one.codes for one in tensors]), joined([one.scale for one in tensors])
            return OptimState8bit(codes, scale, first.qmap, first.signed, first.dtype)
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def copy_back(whole: Any, tensors: list[Any]) -> None:
        """Copies what `joined` gave to where it came from."""
        if isinstance(whole, OptimState8bit):
            copy_back(whole.codes, [one.codes for one in tensors])
            copy_back(whole.scale, [one.scale for one in tensors])
        else:
            parts = whole.split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(tensors, [part.view_as(own) for part, own in zip(parts, tensors, strict=True)])

    class OnShards(kind):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            # A few more graphs, where a number of rows is equal to another size; dynamo's limit, 8, is an error here.
            # The group's settings are the same in all steps, so they are constants of the graph: as inputs each would
            # become a tensor in each call.
            unlimited = {"recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
            with torch._dynamo.config.patch({"specialize_float": True, **unlimited}):
                for group in self.param_groups:
                    self._update(group)

        def _update(self, group: dict[str, Any]) -> None:
            updates = [self._update_of(p) for p in group["params"] if p.grad is not None]
            if not updates:
                return
            torch._foreach_add_([update.step for update in updates], 1)
            for small in _together(updates):
                parameters, gradients, steps, firsts, seconds = map(list, zip(*small, strict=True))
                whole = _Update(joined(parameters), joined(gradients), steps[0], joined(firsts), joined(seconds))
                self._apply(whole, group)
                copy_back(whole.parameter, parameters)
                copy_back(whole.first, firsts)
                copy_back(whole.second, seconds)
            for update in updates:
                if update.parameter.numel() >= JOINED:
                    self._apply(update, group)

        def _update_of(self, p: Tensor) -> _Update:
            state = self.state[p]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = self._new_buffer(p, signed=True)
                state["exp_avg_sq"] = self._new_buffer(p, signed=False)
            assert p.grad is not None
            moments = local(state["exp_avg"]), local(state["exp_avg_sq"])
            return _Update(local(p.detach()), local(p.grad), state["step"], *moments)

        def _apply(self, update: _Update, group: dict[str, Any]) -> None:
            parameter, moment = update.parameter, update.first
            function = fused if compiles(parameter.device) else single_param_adam
            function(
                rows(parameter, moment),
                rows(update.gradient, moment),
                update.step,
                rows(moment, moment),
                rows(update.second, moment),
                None,
                group["lr"],
                *group["betas"],
                group["weight_decay"],
                group["eps"],
                self.is_adamw,
                self.bf16_stochastic_round and parameter.dtype is torch.bfloat16,
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
