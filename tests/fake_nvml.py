"""What wandistill asks of pynvml, told of the cards that the variable FAKE_NVML lists as JSON."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

NVML_DEVICE_MIG_DISABLE = 0
# Drivers never get too new.
DRIVER, CUDA = "999.1", 99000


class NVMLError(Exception):
    """NVML does not answer."""


class NVMLError_NotSupported(NVMLError):
    """The card has no such thing."""


def card(total: int, free: int | None = None, **more: Any) -> dict[str, Any]:
    """A card of `total` bytes; `more` is its name, UUID, and whether MIG divides it."""
    return {"total": total, "free": total if free is None else free, **more}


def nvmlInit() -> None:
    if "FAKE_NVML" not in os.environ:
        raise NVMLError


def nvmlShutdown() -> None:
    pass


def nvmlSystemGetDriverVersion() -> str:
    return DRIVER


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    return CUDA


def nvmlDeviceGetCount() -> int:
    return len(_cards())


def nvmlDeviceGetHandleByIndex(number: int) -> dict[str, Any]:
    return {"name": "NVIDIA GeForce RTX 3090", "uuid": f"GPU-{number}000", **_cards()[number]}


def nvmlDeviceGetName(handle: dict[str, Any]) -> str:
    return handle["name"]


def nvmlDeviceGetUUID(handle: dict[str, Any]) -> str:
    return handle["uuid"]


def nvmlDeviceGetMemoryInfo(handle: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(total=handle["total"], free=handle["free"], used=handle["total"] - handle["free"])


def nvmlDeviceGetMigMode(handle: dict[str, Any]) -> list[int]:
    if "mig" not in handle:
        raise NVMLError_NotSupported
    return [int(handle["mig"]), int(handle["mig"])]


def _cards() -> list[dict[str, Any]]:
    return json.loads(os.environ["FAKE_NVML"])
