"""Optimizers of half-precision weights against torchao's own step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torchao.optim import AdamW8bit
from torchao.optim.adam import _AdamW

from wandistill.planner.updates import JOINED, ROW
from wandistill.train.optimizer import BETAS, build_optimizer

# With 8-bit moments, too small for them, and not a whole number of blocks. Small ones, which are updated together, come
# first, and of each kind in turn: in that order random numbers are drawn. The last two are updated on their own.
SHAPES = [(64, 128), (4096,), (32, 16, 1, 2, 2), (300, 20), (100,), (1, 6, 64), (512, 256), (300, 301)]


@pytest.mark.parametrize(("name", "theirs"), [("adamw_bf16", _AdamW), ("adamw8bit", AdamW8bit)])
def test_parameters_in_rows_take_torchao_s_steps_to_the_bit(
    name: str, theirs: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # would take a C++ compiler
    torch.manual_seed(0)
    starts = [torch.randn(shape).bfloat16() for shape in SHAPES]
    steps = [[torch.randn(shape).bfloat16() for shape in SHAPES] for _ in range(3)]
    found = []
    for build in (
        lambda parameters: build_optimizer(name, parameters, 1e-2, 0.1),
        lambda parameters: theirs(parameters, lr=1e-2, betas=BETAS, weight_decay=0.1, bf16_stochastic_round=True),
    ):
        parameters = [nn.Parameter(start.clone()) for start in starts]
        optimizer = build(parameters)
        torch.manual_seed(1)
        for gradients in steps:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        found.append(parameters)
    assert sum(math.prod(shape) >= JOINED for shape in SHAPES) == 2
    ours, own = found
    assert all(torch.equal(one, other) for one, other in zip(ours, own, strict=True))
    assert not any(torch.equal(one, start) for one, start in zip(ours, starts, strict=True))


def test_parameters_that_took_other_numbers_of_steps_are_not_joined() -> None:
    def stepped(*gradients: tuple[bool, bool]) -> list[nn.Parameter]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.ones(8)) for _ in range(2)]
        optimizer = build_optimizer("adamw_bf16", parameters, 1e-2, 0.0)
        for given in gradients:
            for parameter, has in zip(parameters, given, strict=True):
                parameter.grad = torch.ones(8) if has else None
            optimizer.step()
        return parameters

    both, late = stepped((True, True), (True, True)), stepped((True, False), (True, True))
    assert torch.equal(both[0], late[0]) and torch.equal(late[1], stepped((True, True))[1])


def test_a_row_of_small_parameters_is_no_longer_than_the_planner_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.ones(JOINED - 1)) for _ in range(9)]
    optimizer = build_optimizer("adamw_bf16", parameters, 1e-2, 0.0)
    rows = []
    step = optimizer._apply

    def apply(update: Any, group: dict[str, Any]) -> None:
        rows.append(update.parameter.numel())
        step(update, group)

    monkeypatch.setattr(optimizer, "_apply", apply)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert sum(rows) == 9 * (JOINED - 1) and max(rows) <= ROW and len(rows) == 3
    assert all(torch.equal(parameter, parameters[0]) and parameter[0] < 1 for parameter in parameters)
