"""`python -m tests.cpu.bench_optimizer`: the host's time for an optimizer step, in additions of a few numbers in place.

Those are the figures of `wandistill.planner.updates.HOST_WORK`. Parameters are small, so that the host is the bound,
and on a CPU, where what is launched is a call; compiling there takes a C++ compiler. What grows with the elements
(8-bit moments need 4,096 at least) is taken off by a second size. The median of some steps, each beside its own
additions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from wandistill.planner.request import OPTIMIZERS
from wandistill.train import optimizer
from wandistill.train.optimizer import build_optimizer

_PARAMETERS, _STEPS, _ADDITIONS = 200, 15, 1000
_SIZES = {"adamw": (64, 256), "adamw_bf16": (64, 256), "adamw8bit": (4096, 16384)}


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    for name in OPTIMIZERS:
        print(f"{name}: {additions(name, alone=False):.1f} a parameter that is joined", flush=True)
        if name != "adamw":
            print(f"{name}: {additions(name, alone=True):.1f} a parameter on its own", flush=True)


def additions(name: str, *, alone: bool) -> float:
    """For one parameter, without what its elements take."""
    small, large = _SIZES[name]
    optimizer.JOINED = 0 if alone else large + 1
    optimizer.compiles = lambda device: True
    few, many = (step_in_additions(name, size, alone=alone) / _PARAMETERS for size in (small, large))
    return few - (many - few) / (large / small - 1)


def step_in_additions(name: str, elements: int, *, alone: bool) -> float:
    """A step with its clipping, over one addition."""
    dtype = torch.float32 if name == "adamw" else torch.bfloat16
    parameters = [nn.Parameter(torch.randn(elements).to(dtype)) for _ in range(_PARAMETERS)]
    stepper = build_optimizer(name, parameters, 1e-4, 0.01)
    if name == "adamw":
        stepper = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True)
    elif not alone:
        stepper._apply = lambda *_: None  # of many, one call whose share is nothing: left out
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    few = torch.zeros(4)

    def step() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        clip_grads_with_norm_(parameters, 1.0, get_total_norm([p.grad for p in parameters if p.grad is not None]))
        stepper.step()
        stepper.zero_grad()

    def add() -> None:
        for _ in range(_ADDITIONS):
            few.add_(1)

    step()
    step()
    return statistics.median(seconds(step) / seconds(add) * _ADDITIONS for _ in range(_STEPS))


def seconds(function: Callable[[], None]) -> float:
    """Of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
