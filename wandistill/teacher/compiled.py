"""Compiling a teacher's blocks (`--teacher_compile`)."""

from __future__ import annotations

import torch
from torch import nn

BACKEND = "inductor"
# Shapes that a run meets: a step's micro-batch, its remainder under --teacher_micro_batch, those of rollouts. Dynamo's
# own limit, 8, is an error with whole graphs.
_SHAPES = 32


def compile_block(block: nn.Module) -> None:
    """Has `block` run compiled for each shape that it meets, from its first call on.

    The weights are inputs of the compiled code, so that blocks, slots and experts share it: it is compiled once.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _SHAPES)
    block.compile(backend=BACKEND, fullgraph=True, dynamic=False)
