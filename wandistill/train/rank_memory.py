"""A rank's memory as samples: its GPU's through torch and NVML, its process's through /proc."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch

from wandistill.metrics.snapshot import Sample
from wandistill.teacher.host_memory import pinned_bytes
from wandistill.train.measured_terms import MeasuredTerms

_log = logging.getLogger(__name__)

# Adding up a process's shares of its pages walks all its page tables, so it may take this part of the time.
_PSS_SHARE = 0.005
_PSS_LEAST_SECONDS = 5.0


class HostMemory:
    """Host memory of this process."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc
        self._pss: int | None = None
        self._next_pss = 0.0

    def samples(self) -> dict[str, list[Sample]]:
        """The samples; what the kernel does not tell is left out."""
        kinds = {"pinned": pinned_bytes() + _torch_pinned_bytes()}
        with contextlib.suppress(OSError):
            status = _kilobytes(self._proc / "status", ("VmRSS", "RssShmem"))
            kinds |= {"rss": status["VmRSS"], "shared": status.get("RssShmem", 0)}
        self._renew_pss()
        if self._pss is not None:
            kinds["pss"] = self._pss
        return {"wandistill_rank_host_memory_bytes": [({"kind": kind}, size) for kind, size in kinds.items()]}

    def _renew_pss(self) -> None:
        began = time.monotonic()
        if began < self._next_pss:
            return
        with contextlib.suppress(OSError, KeyError):
            self._pss = _kilobytes(self._proc / "smaps_rollup", ("Pss",))["Pss"]
        ended = time.monotonic()
        self._next_pss = ended + max(_PSS_LEAST_SECONDS, (ended - began) / _PSS_SHARE)


class GpuMemory:
    """Memory of a rank's GPU."""

    def __init__(self, device: torch.device) -> None:
        import pynvml

        self._device = device
        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        properties = torch.cuda.get_device_properties(device)
        self._uuid = f"GPU-{properties.uuid}"
        self._name = properties.name
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
        self.terms = MeasuredTerms(device, self._allocated)

    def samples(self) -> dict[str, list[Sample]]:
        """The samples."""
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        counted = self.terms.counted()
        own = torch.cuda.memory_stats(self._device)
        allocated, reserved = own.get("allocated_bytes.all.current", 0), own.get("reserved_bytes.all.current", 0)
        states = {
            "allocated": allocated,
            "reserved": reserved,
            "peak": own.get("allocated_bytes.all.peak", 0),
            "total": memory.total,
            "free": memory.free,
            "other": max(memory.used - self._used_here(reserved), 0),
        }
        return {
            "wandistill_rank_gpu_memory_bytes": [({"state": state}, size) for state, size in states.items()],
            "wandistill_rank_gpu_info": [({"gpu_uuid": self._uuid, "gpu_name": self._name}, 1)],
            "wandistill_rank_gpu_allocator_retries_total": [({}, own.get("num_alloc_retries", 0))],
            **self.terms.samples(allocated, counted),
        }

    def _allocated(self) -> int:
        """What torch has allocated, without the work of making flat names for all that it counts."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["current"])

    def _used_here(self, reserved: int) -> int:
        """What NVML says that this process takes, its CUDA context included.

        NVML knows the host's process ids, which a container does not. The only process on a GPU is this one; among
        several that it cannot tell apart, it is sure of torch's reserved memory alone.
        """
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        own = [process for process in processes if process.pid == os.getpid()]
        if not own and len(processes) == 1:
            own = processes
        return int(own[0].usedGpuMemory) if own and own[0].usedGpuMemory else reserved


def gpu_memory(device: torch.device) -> GpuMemory | None:
    """That of `device`; None for one that is no GPU, or whose driver does not answer."""
    if device.type != "cuda":
        return None
    try:
        return GpuMemory(device)
    # pynvml raises an error class for each of NVML's codes, a GPU under MIG or a masked driver among them.
    except Exception as error:
        _log.warning(f"note: NVML does not tell of {device} ({error}); its memory is not among the metrics.")
        return None


def _torch_pinned_bytes() -> int:
    """What torch's own pinned allocator holds."""
    if not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def _kilobytes(path: Path, names: tuple[str, ...]) -> dict[str, int]:
    """Bytes of the lines `Name: N kB`."""
    found = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name in names:
            found[name] = int(value.split()[0]) * 1024
    return found
