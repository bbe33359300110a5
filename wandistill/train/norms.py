"""RMS norms under autocast, alike on every torch.

Autocast runs them in float32 from torch 2.12 on. Before, it left them alone: an activation in half precision then met a
weight in float32, for which there is no fused kernel, and backward kept two float32 copies of the activation.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def norms_in_float32(module: nn.Module) -> None:
    """Lets the RMS norms of `module` run in float32 under autocast, and return float32."""
    for norm in module.modules():
        if isinstance(norm, nn.RMSNorm):
            norm.forward = partial(_forward, norm)  # type: ignore[method-assign]


def _forward(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return F.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)
    with torch.autocast(kind, enabled=False):
        return F.rms_norm(x.float(), norm.normalized_shape, norm.weight.float(), norm.eps)
