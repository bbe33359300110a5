"""Whether a node's GPU driver is new enough for the CUDA that torch was built with. No torch: its version is read."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from wandistill.errors import ConfigError

# The first driver of each CUDA major release, on Linux (CUDA's release notes, table "CUDA Toolkit and Minimum Required
# Driver Version for CUDA Minor Version Compatibility"). Within a major release every minor one runs on it.
_FIRST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}


Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Driver:
    """A GPU driver."""

    version: str  # such as 535.104.05
    cuda: tuple[int, int]  # the newest CUDA that it runs


def ask_nvml(question: Callable[[Any], Answer]) -> Answer | None:
    """What `question` finds out from NVML, which it is given; None where there is no NVML, or it cannot tell."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return question(pynvml)
    except pynvml.NVMLError:
        return None
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def nvml_text(value: str | bytes) -> str:
    """A text of NVML's, which older versions of pynvml give as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def installed_driver() -> Driver | None:
    """The driver of this machine, by NVML; None where there is none or it cannot be asked."""

    def version(nvml: Any) -> Driver:
        number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())  # 12020 is 12.2
        return Driver(nvml_text(nvml.nvmlSystemGetDriverVersion()), (number // 1000, number % 1000 // 10))

    return ask_nvml(version)


def torch_cuda() -> tuple[int, int] | None:
    """The CUDA that torch was built with; None without torch, or where it was built for CPUs or other cards."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    with suppress(OSError):
        text = (Path(found.submodule_search_locations[0]) / "version.py").read_text(encoding="utf-8")
        match = re.search(r"^cuda\b[^=]*= *'(\d+)\.(\d+)", text, re.MULTILINE)
        return (int(match[1]), int(match[2])) if match else None
    return None


def check_driver(
    driver: Callable[[], Driver | None] = installed_driver, cuda: Callable[[], tuple[int, int] | None] = torch_cuda
) -> None:
    """Refuses a driver that is older than torch's CUDA; where one of the two is not known, nothing is said.

    Raises:
        ConfigError: with both versions.
    """
    built = cuda()
    there = driver() if built else None
    if built is None or there is None or there.cuda[0] >= built[0]:
        return
    first = _FIRST_DRIVERS.get(built[0])
    needed = f"driver {first} or newer" if first else f"a driver for CUDA {built[0]}"
    raise ConfigError(
        f"this node's GPU driver {there.version} runs CUDA {there.cuda[0]}.{there.cuda[1]}, but torch here was built "
        f"for CUDA {built[0]}.{built[1]}: install {needed} on the node, or build the image with a torch for CUDA "
        f"{there.cuda[0]}."
    )
