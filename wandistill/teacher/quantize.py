"""Storage of a teacher's Linear weights in 8 bits, and what it costs.

Each output channel (row) has a scale; a block is turned back to bfloat16 when its turn comes, so compute is that of a
bfloat16 teacher. int8 is the nearer one at the same bytes: on the embedded teacher 0.8 % of the guided target against
2.8 % with float8 (e4m3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wandistill.errors import ConfigError
from wandistill.teacher.base import Expert, Request, Teacher

# The greatest number of each type: int8 is used symmetrically.
_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max}
# Elements that a CPU turns back at a time.
_CPU_PIECE = 1 << 16
# Relative L2 error of the target above which a run is refused.
ERROR_LIMIT = 0.05


def quantize_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`weight` [rows, columns] in 8 bits, and the scale of each row [rows], float32, that maps its largest to the
    largest number of `dtype`; a row of zeros has scale 1."""
    weight = weight.float()
    limit = _LIMITS[dtype]
    least, most = torch.aminmax(weight, dim=1)
    largest = torch.maximum(most, -least)
    scale = torch.where(largest > 0, largest / limit, torch.ones_like(largest))
    scaled = (weight / scale[:, None]).clamp_(-limit, limit)
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scale


def dequantize_rows(stored: Tensor, scale: Tensor, out: Tensor) -> None:
    """Puts the weights of `quantize_rows` in `out` [rows, columns], bfloat16, or on a CPU also float32: rounded to
    bfloat16 all the same.

    8-bit numbers are exact in bfloat16, and the product is computed in float32: each weight is rounded once.
    """
    if out.device.type == "cpu":
        # A CPU converts whole operands first: rows at a time, so that the copies stay in its caches.
        rows = max(_CPU_PIECE // out.shape[1], 1)
        for piece, scales, target in zip(stored.split(rows), scale.split(rows), out.split(rows), strict=True):
            target.copy_(piece.float().mul_(scales[:, None]).bfloat16())
    elif stored.dtype == torch.int8:
        # One kernel, which reads the 8-bit numbers and writes the weights.
        torch.mul(stored, scale[:, None], out=out)
    else:
        # float8 has no arithmetic.
        out.copy_(stored)
        out.mul_(scale[:, None])


def quantization_error(quantized: Teacher, reference: Teacher, requests: Sequence[Request]) -> dict[Expert, float]:
    """How far `quantized` is from `reference` in the targets that a run trains on: for each expert that `requests`
    ask, the relative L2 distance of the (guided) velocities of all its requests together.

    A teacher gets all requests before it is asked for an answer, so that one which is read from disk is read once."""
    answers = []
    for teacher in (quantized, reference):
        tickets = [teacher.request(ask.x, ask.t, ask.prompt, ask.expert, ask.guidance) for ask in requests]
        answers.append([teacher.result(ticket).velocity.double() for ticket in tickets])
    sums: dict[Expert, list[float]] = {}
    for request, ours, theirs in zip(requests, *answers, strict=True):
        total = sums.setdefault(request.expert, [0.0, 0.0])
        total[0] += (ours - theirs).square().sum().item()
        total[1] += theirs.square().sum().item()
    return {expert: math.sqrt(error / norm) for expert, (error, norm) in sums.items()}


def check_quantization(errors: Mapping[Expert, float], dtype: str, *, allow: bool = False) -> None:
    """Refuses storage that moves the targets too far.

    Raises:
        ConfigError: an expert's error is above `ERROR_LIMIT` and `allow` is not set.
    """
    worst = max(errors, key=lambda expert: errors[expert])
    # Written so that an error that is no number is refused too.
    if allow or errors[worst] <= ERROR_LIMIT:
        return
    advice = "" if dtype == "int8" else "int8 (nearer at the same bytes) or "
    raise ConfigError(
        f"--teacher_dtype {dtype} moves the targets of expert {worst.value} by {errors[worst]:.1%} of their length, "
        f"more than {ERROR_LIMIT:.0%}: take {advice}bfloat16, or --force to train on them all the same."
    )
