"""Measures a rank's machine before anything loads: memory, links, disk, and one block of teacher and student.

What is allocated here is given back, and random numbers come from generators of its own, so that training starts as
if nothing had been measured. A GPU takes about a second, a CPU a tenth.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from wandistill.launch.cgroup import MemoryCgroup
from wandistill.models.forward import BlockState, run_block
from wandistill.models.weights import with_one_block
from wandistill.planner.activations import Pass
from wandistill.planner.measured import BlockProbe, BlockProbes, GpuProbe, RankProbe, block_to_measure
from wandistill.planner.placements import Placement
from wandistill.planner.request import PlanRequest
from wandistill.planner.teacher_memory import compute_bytes
from wandistill.teacher.host_memory import HostBuffers, available_bytes
from wandistill.teacher.resident import cpu_computes
from wandistill.train.distributed import World
from wandistill.train.memory import host_memory
from wandistill.train.norms import norms_in_float32
from wandistill.units import GIB, MIB

# A block's operations and weights at most: a fraction of a second on the slowest device that is worth a run.
_GPU_WORK, _GPU_WEIGHTS = 4e12, 4 * GIB
_CPU_WORK, _CPU_WEIGHTS = 2.5e8, 4 * MIB
_COPIED, _GATHERED = 256 * MIB, 32 * MIB
# Sides of matrices: large enough for a GPU's full speed, small enough for a CPU that emulates bfloat16.
_GPU_MATRIX, _CPU_MATRIX, _CPU_HALF_MATRIX = 4096, 256, 128
# What is read of the teacher's files, past the page cache, and with how many threads.
_READ, _READS, _READERS = 2 * MIB, 32, 4
_CPU = torch.device("cpu")

T = TypeVar("T")


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
        core_float32=_product(_CPU_MATRIX, torch.float32, _CPU),
        core_bfloat16=_product(_CPU_HALF_MATRIX, torch.bfloat16, _CPU),
        shm=shm.f_blocks * shm.f_frsize if shm else 0,
        shm_free=shm.f_bavail * shm.f_frsize if shm else 0,
        disk_free=_disk_free(output_dir),
        disk_rate=_disk_rate(teacher) if world.local_rank == 0 else None,
    )


def probe_blocks(request: PlanRequest, transformer_config: Mapping[str, Any], world: World) -> BlockProbes:
    """The forward of one block of teacher and student, in the run's own shape as far as that does not take long.

    All ranks call this together, since on a CPU they share it.
    """
    world.barrier()
    teacher = request.teacher_pass(request.teacher_piece, compute_bytes(request, Placement.GPU))
    own = _block(teacher, transformer_config, world.device, fp16=request.teacher_dtype == "float16")
    if not request.trains:
        return BlockProbes(own)
    student = request.student_pass(request.batch_size)
    return BlockProbes(own, _block(student, transformer_config, world.device, fp16=request.mixed_precision == "fp16"))


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
        "half": _unless_full(lambda: _product(_GPU_MATRIX, torch.bfloat16, device)),
        "float32": _unless_full(lambda: _product(_GPU_MATRIX, torch.float32, device)),
        "memory": _unless_full(lambda: _copy_rate(device)),
    }
    _forget(device)
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


def _unless_full(measure: Callable[[], T]) -> T | None:
    """What `measure` gives, or None where the GPU has no memory for it: the plan will say so."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        return None


def _forget(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _seconds(function: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """The better of two measurements of `calls` calls in a row, in seconds a call."""

    def once() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / calls

    once()
    return min(once(), once())


def _product(side: int, dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of a product of two square matrices."""
    matrix = _random((side, side), dtype, device)
    return 2 * side**3 / _seconds(lambda: matrix @ matrix, device)


def _copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / _seconds(lambda: target.copy_(source), device)


def _host_link(world: World) -> float | None:
    """Bytes a second from page-locked memory, while all ranks copy."""
    target = _unless_full(lambda: torch.empty(_COPIED, dtype=torch.uint8, device=world.device))
    buffer = HostBuffers(_COPIED, 1, world.device)
    world.barrier()
    seconds = None
    if target is not None:
        seconds = _seconds(lambda: target.copy_(buffer.tensors[0], non_blocking=True), world.device)
    buffer.close()
    return _COPIED / seconds if seconds else None


def _peer_link(world: World) -> float | None:
    """Bytes a second that reach a rank while all gather from all; None on all ranks where one has no memory for it."""
    gathered = _unless_full(lambda: torch.empty(world.size, _GATHERED, dtype=torch.uint8, device=world.device))
    if world.any(gathered is None) or gathered is None:
        return None
    own = gathered[world.rank].clone()
    seconds = _seconds(lambda: dist.all_gather_into_tensor(gathered, own), world.device)
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


def _block(run: Pass, config: Mapping[str, Any], device: torch.device, *, fp16: bool) -> BlockProbe | None:
    """Seconds of one block's forward; None where there is no memory for it, or a CPU would emulate its precision."""
    on_gpu = device.type == "cuda"
    half = torch.float16 if fp16 else torch.bfloat16
    if not on_gpu and run.compute.hidden == 2 and not cpu_computes(half):
        return None
    work, weights = (_GPU_WORK, _GPU_WEIGHTS) if on_gpu else (_CPU_WORK, _CPU_WEIGHTS)
    measured = block_to_measure(run, work=work, weights=weights)
    seconds = _unless_full(lambda: _block_seconds(measured, config, half, device))
    _forget(device)
    return None if seconds is None else BlockProbe(measured, seconds)


@torch.no_grad()
def _block_seconds(run: Pass, config: Mapping[str, Any], half: torch.dtype, device: torch.device) -> float:
    architecture, compute = run.architecture, run.compute
    block = with_one_block({**config, **architecture.to_config()}).blocks[0]
    for name, parameter in block.named_parameters():
        wide = compute.stored == 4 or not set(WanTransformer3DModel._keep_in_fp32_modules).isdisjoint(name.split("."))
        values = _random(tuple(parameter.shape), torch.float32 if wide else half, device)
        owner, _, key = name.rpartition(".")
        setattr(block.get_submodule(owner), key, nn.Parameter(values, requires_grad=False))
    block.requires_grad_(False).eval()
    norms_in_float32(block)
    hidden = half if compute.hidden == 2 else torch.float32
    width, head = architecture.hidden_size, architecture.attention_head_dim
    times = (run.batch, run.tokens, 6, width) if run.per_token else (run.batch, 6, width)
    state = BlockState(
        hidden=_random((run.batch, run.tokens, width), hidden, device),
        prompt=_random((run.batch, run.prompt, width), hidden, device),
        time_projection=_random(times, hidden, device),
        rotary=(_random((1, run.tokens, 1, head), torch.float32, device),) * 2,
        time_embedding=torch.empty(0),
        latent_shape=(1, 1, run.tokens),
    )
    with torch.autocast(device.type, half, enabled=compute.autocast):
        return _seconds(lambda: run_block(block, state), device, calls=4 if device.type == "cuda" else 1)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Small random numbers; zeros would let a GPU run faster than it does with weights."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.empty(shape, dtype=dtype, device=device).uniform_(-0.1, 0.1, generator=generator)


def _disk_free(output_dir: Path) -> int:
    """Bytes for the run's checkpoints: what is free, and what those take that are there already."""
    there = output_dir.absolute()
    kept = sum(file.stat().st_size for file in (there / "checkpoints").rglob("*") if file.is_file())
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free + kept


def _disk_rate(teacher: Path) -> float | None:
    """Bytes a second that the teacher's largest file is read with, past the page cache, by a few threads.

    None where it is too small to tell, or its file system has no such reads (a disk in memory).
    """
    file = max(teacher.glob("*/*.safetensors"), key=lambda path: path.stat().st_size, default=None)
    if file is None or file.stat().st_size < _READS * _READ:
        return None

    def read(number: int) -> None:
        with mmap.mmap(-1, _READ) as buffer:
            os.preadv(descriptor, [buffer], number * _READ)

    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        began = time.perf_counter()
        with ThreadPoolExecutor(_READERS) as readers:
            list(readers.map(read, range(_READS)))
        return _READS * _READ / (time.perf_counter() - began)
    except OSError:
        return None
    finally:
        os.close(descriptor)
