"""RMS norms of a student under autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wandistill.train.norms import norms_in_float32


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_under_autocast_they_compute_and_return_float32_whatever_comes_in(weight: torch.dtype) -> None:
    norm = nn.RMSNorm(8, eps=1e-6, dtype=weight)
    norms_in_float32(nn.Sequential(norm))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(x)
    assert out.dtype == torch.float32
    assert torch.equal(out, F.rms_norm(x.float(), (8,), norm.weight.float(), 1e-6))


def test_elsewhere_they_are_torch_s_own() -> None:
    norm, own = nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(8, eps=1e-6)
    norms_in_float32(norm)
    x = torch.randn(3, 8)
    assert torch.equal(norm(x), own(x)) and norm(x.bfloat16().float()).dtype == torch.float32
