"""What a run would measure of a machine that is not there."""

from __future__ import annotations

from typing import Any

from wandistill.planner.measured import GpuProbe, RankProbe
from wandistill.units import GIB, MIB


def card(**values: Any) -> GpuProbe:
    """An RTX 3090 as a probe finds it."""
    measured = {
        "name": "NVIDIA GeForce RTX 3090",
        "capability": (8, 6),
        "total": int(23.68 * GIB),
        "free": int(23.0 * GIB),
        "reserved": 64 * MIB,
        "alone": True,
        "peer_access": False,
        "host_link": 25e9,
        "peer_link": None,
        "half": 60e12,
        "float32": 30e12,
        "memory": 800e9,
    }
    return GpuProbe(**{**measured, **values})


def rank(gpu: GpuProbe | None = None, **values: Any) -> RankProbe:
    measured = {
        "node": 0,
        "host_available": 120 * GIB,
        "host_limit": 128 * GIB,
        "host_own": GIB // 2,
        "cores": 16,
        "core_float32": 4e11,
        "core_bfloat16": 3e11,
        "shm": 64 * GIB,
        "shm_free": 60 * GIB,
        "disk_free": 10**12,
        "disk_rate": 4e9,
    }
    return RankProbe(gpu=gpu, **{**measured, **values})
