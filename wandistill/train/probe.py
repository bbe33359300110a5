"""Measures a rank's machine before anything loads: memory, links, disk, and how fast matrices are multiplied.

What is allocated here and in `wandistill.train.probe_blocks` is given back, and random numbers come from generators of
its own, so that training starts as if nothing had been measured. A GPU takes two seconds, a CPU less.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from wandistill.launch.cgroup import MemoryCgroup
from wandistill.launch.memory import available_bytes
from wandistill.planner.measured import GpuProbe, RankProbe
from wandistill.teacher.host_memory import HostBuffers
from wandistill.teacher.record_reader import read_rate
from wandistill.teacher.resident import cpu_computes
from wandistill.train.distributed import World
from wandistill.train.measuring import best_seconds, forget, random_numbers, unless_full
from wandistill.train.memory import host_memory
from wandistill.units import MIB

_COPIED, _GATHERED = 256 * MIB, 32 * MIB
# Side of a GPU's matrices, large enough for its full speed; of a CPU's, as a feed-forward has it, and the most rows.
_GPU_MATRIX, _CPU_MATRIX, _CPU_ROWS = 4096, (1024, 4096), 1024
# A CPU is measured for so long that waking its threads is a small part.
_CPU_SECONDS = 0.005
# A file smaller than this tells nothing of the disk; the teacher's largest is read for so long.
_READ, _READ_SECONDS = 64 * MIB, 0.4
# Additions in a row, fewer than a GPU's queue takes, and how often.
_ADDITIONS, _ROWS = 200, 5
_CPU = torch.device("cpu")


def probe_machine(world: World, teacher: Path, output_dir: Path) -> RankProbe:
    """The machine of this rank; all ranks call this together.

    Args:
        teacher: folder of the teacher's files, whose disk is measured.
        output_dir: where the run writes.
    """
    gpu = _gpu(world) if world.device.type == "cuda" else None
    world.barrier()
    cgroup = MemoryCgroup.own()
    limit = cgroup.tightest() if cgroup else None
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return RankProbe(
        node=world.node,
        gpu=gpu,
        host_available=available_bytes(),
        host_limit=limit.limit if limit else None,
        host_own=host_memory().private,
        cores=len(os.sched_getaffinity(0)),
        core_float32=_cpu_product(torch.float32),
        core_bfloat16=_cpu_product(torch.bfloat16),
        shm=shm.f_blocks * shm.f_frsize if shm else 0,
        shm_free=shm.f_bavail * shm.f_frsize if shm else 0,
        disk_free=_disk_free(output_dir),
        disk_rate=_disk_rate(teacher) if world.local_rank == 0 else None,
        operation=_addition(_CPU),
        launch=unless_full(lambda: _addition(world.device)),
        computes_bfloat16=cpu_computes(torch.bfloat16),
    )


def with_context(found: RankProbe, device: torch.device) -> RankProbe:
    """`found` with the memory of GPU and process as it is now, after `probe_blocks`: kernels take memory once they are
    loaded, on both."""
    if found.gpu is None or device.type != "cuda":
        return found
    total, free, reserved = _memory(device)
    gpu = replace(found.gpu, total=total, free=free, reserved=reserved)
    own = host_memory().private
    # What it took meanwhile is no longer available.
    available = found.host_available - max(own - found.host_own, 0)
    return replace(found, gpu=gpu, host_available=available, host_own=own)


def _gpu(world: World) -> GpuProbe:
    device = world.device
    others = [rank for rank in range(world.local_size) if rank != world.local_rank]
    rates = {
        "host_link": _host_link(world),
        "peer_link": _peer_link(world) if others and world.size == world.local_size else None,
        "half": unless_full(lambda: _product(_GPU_MATRIX, torch.bfloat16, device)),
        "float32": unless_full(lambda: _product(_GPU_MATRIX, torch.float32, device)),
        "memory": unless_full(lambda: _copy_rate(device)),
    }
    forget(device)
    total, free, reserved = _memory(device)
    return GpuProbe(
        name=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        alone=_alone(device),
        total=total,
        free=free,
        reserved=reserved,
        peer_access=all(torch.cuda.can_device_access_peer(device, other) for other in others),
        **rates,
    )


def _memory(device: torch.device) -> tuple[int, int, int]:
    """Bytes of the GPU, free, and reserved by this process."""
    free, total = torch.cuda.mem_get_info(device)
    return total, free, torch.cuda.memory_reserved(device)


def _product(side: int, dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of a product of two square matrices."""
    matrix = random_numbers((side, side), dtype, device)
    return 2 * side**3 / best_seconds(lambda: matrix @ matrix, device)


def _cpu_product(dtype: torch.dtype) -> float:
    """Operations a second of all threads with a matrix as a feed-forward has it, of as many rows as take long enough to
    tell: a CPU that emulates bfloat16 is measured with few."""
    inner, columns = _CPU_MATRIX
    weights = random_numbers((columns, inner), dtype, _CPU)
    rows, seconds = 1, 0.0
    while seconds < _CPU_SECONDS and rows < _CPU_ROWS:
        rows *= 2
        states = random_numbers((rows, inner), dtype, _CPU)
        seconds = best_seconds(lambda states=states: F.linear(states, weights), _CPU)  # type: ignore[misc]
    return 2 * rows * inner * columns / seconds


def _addition(device: torch.device) -> float:
    """Seconds of the host for an addition of a few numbers in place, the launch of a kernel where there is one."""
    few = torch.zeros(4, device=device)

    def row() -> float:
        began = time.perf_counter()
        for _ in range(_ADDITIONS):
            few.add_(1)
        seconds = (time.perf_counter() - began) / _ADDITIONS
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return seconds

    row()
    return statistics.median(row() for _ in range(_ROWS))


def _copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / best_seconds(lambda: target.copy_(source), device)


def _host_link(world: World) -> float | None:
    """Bytes a second from page-locked memory, while all ranks copy."""
    target = unless_full(lambda: torch.empty(_COPIED, dtype=torch.uint8, device=world.device))
    buffer = HostBuffers(_COPIED, 1, world.device)
    world.barrier()
    seconds = None
    if target is not None:
        seconds = best_seconds(lambda: target.copy_(buffer.tensors[0], non_blocking=True), world.device)
    buffer.close()
    return _COPIED / seconds if seconds else None


def _peer_link(world: World) -> float | None:
    """Bytes a second that reach a rank while all gather from all; None on all ranks where one has no memory for it."""
    gathered = unless_full(lambda: torch.empty(world.size, _GATHERED, dtype=torch.uint8, device=world.device))
    if world.any(gathered is None) or gathered is None:
        return None
    own = gathered[world.rank].clone()
    seconds = best_seconds(lambda: dist.all_gather_into_tensor(gathered, own), world.device)
    return (world.size - 1) * _GATHERED / seconds


def _alone(device: torch.device) -> bool:
    """Whether this is the only process on the GPU; False where the driver's library does not tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return len(pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))) == 1
    except pynvml.NVMLError:
        return False


def _disk_free(output_dir: Path) -> int:
    """Bytes for the run's checkpoints: what is free, and what those take that are there already."""
    there = output_dir.absolute()
    kept = sum(file.stat().st_size for file in (there / "checkpoints").rglob("*") if file.is_file())
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free + kept


def _disk_rate(teacher: Path) -> float | None:
    """Bytes a second that the teacher's largest file is read with, past the page cache, as records are read.

    None where it is too small to tell, or its file system has no such reads (a disk in memory).
    """
    file = max(teacher.glob("*/*.safetensors"), key=lambda path: path.stat().st_size, default=None)
    if file is None or file.stat().st_size < _READ:
        return None
    return read_rate(file, seconds=_READ_SECONDS)
