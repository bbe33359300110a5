"""A rank's GPU memory as metrics is what torch and NVML say, on a real GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


def test_states_are_torch_s_and_nvml_s_numbers_within_one_percent():
    import pynvml

    from wandistill.train.rank_memory import GpuMemory, HostMemory

    device = torch.device("cuda", 0)
    held = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    gone = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    del gone
    pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    told = GpuMemory(device).samples()
    states = {labels["state"]: size for labels, size in told["wandistill_rank_gpu_memory_bytes"]}
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    assert states["allocated"] == torch.cuda.memory_allocated() >= held.nbytes
    assert states["reserved"] == torch.cuda.memory_reserved()
    assert states["peak"] == torch.cuda.max_memory_allocated() >= 2 << 30
    assert states["total"] == info.total
    assert states["free"] == pytest.approx(info.free, rel=0.01)
    assert 0 <= states["other"] < info.total - info.free
    ((labels, _),) = told["wandistill_rank_gpu_info"]
    assert labels["gpu_uuid"].startswith("GPU-") and labels["gpu_name"] == torch.cuda.get_device_name()
    host = {labels["kind"]: size for labels, size in HostMemory().samples()["wandistill_rank_host_memory_bytes"]}
    assert host["pinned"] >= pinned.nbytes


def test_a_fresh_process_without_neighbours_sees_no_memory_of_others():
    from wandistill.train.rank_memory import GpuMemory

    torch.ones(1, device="cuda")
    told = GpuMemory(torch.device("cuda", 0)).samples()
    states = {labels["state"]: size for labels, size in told["wandistill_rank_gpu_memory_bytes"]}
    # The driver's own share of a card that nobody else uses.
    assert states["other"] < 0.02 * states["total"]
