"""A rank's GPU memory as metrics is what torch and NVML say, on a real GPU."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from runs import SHORT, flags, here

from tests.gpu.measure_plan import prepared
from wandistill.demo.captions import training_prompts
from wandistill.metrics import snapshot

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


Look = dict[str, float]  # a snapshot: bytes by term, `unattributed`, `allocated`, and the step


def looks(settings: dict[str, Any], output_dir: Path, monkeypatch: pytest.MonkeyPatch, *switches: str) -> list[Look]:
    """What a run in this process told in its steps, from the third on to the last but one, many times a step."""
    from wandistill.train import rank_snapshot

    told: list[dict[str, list[Any]]] = []

    def write(folder: Path, one: snapshot.Snapshot) -> bool:
        told.append(one.samples)
        return True

    monkeypatch.setattr(rank_snapshot, "INTERVAL", 0.02)
    monkeypatch.setattr(snapshot, "write", write)
    monkeypatch.setenv("WANDISTILL_METRICS_DIR", str(output_dir.parent))
    # What an earlier test left would be unattributed.
    gc.collect()
    torch.cuda.empty_cache()
    assert here(["train", *flags({**settings, "output_dir": output_dir}, *switches)]) == 0
    found = []
    for samples in told:
        trains = ({"phase": "train"}, 1) in samples["wandistill_rank_phase"]
        step = samples["wandistill_step"][0][1] if "wandistill_step" in samples else 0
        if trains and 2 <= step < int(settings["max_steps"]):
            look: Look = {own["term"]: size for own, size in samples["wandistill_rank_gpu_memory_measured_bytes"]}
            ((_, look["unattributed"]),) = samples["wandistill_rank_gpu_memory_unattributed_bytes"]
            states = {own["state"]: size for own, size in samples["wandistill_rank_gpu_memory_bytes"]}
            found.append({**look, "allocated": states["allocated"], "step": step})
    assert found
    return found


def assert_whole(found: list[Look]) -> None:
    """The terms and what is unattributed are what torch has allocated, and none is negative."""
    for look in found:
        parts = [size for name, size in look.items() if name not in ("allocated", "step")]
        assert sum(parts) == look["allocated"] and min(parts) >= 0, look


@pytest.mark.parametrize("placement", ["gpu", "stream"])
def test_terms_of_a_run_of_the_embedded_teacher_add_up(placement, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(training_prompts(32)))
    settings = {**SHORT, "device": "cuda", "data_path": prompts, "batch_size": 32, "max_steps": 100}
    assert_whole(looks({**settings, "teacher_device_strategy": placement}, tmp_path / "out", monkeypatch))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the teacher of the size of a published one is, made by the first test that needs it."""
    return tmp_path_factory.mktemp("teacher")


@pytest.mark.parametrize(
    "settings",
    [
        {"teacher_device_strategy": "gpu", "student_config": "half"},
        {"teacher_device_strategy": "stream", "resident_blocks": 0, "student_config": "half", "feature_weight": 0.1},
        {"teacher_device_strategy": "gpu", "student_config": "half", "teacher_dtype": "int8", "ema_decay": 0.9},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_of_a_teacher_of_1_3_b_under_five_percent_are_unattributed(settings, work, tmp_path, monkeypatch):
    config = prepared(work, "wan2.1-t2v-1.3b", {**settings, "resolution": "480x480", "batch_size": 2}, tiny=False)
    switches = [f"--{name}" for name, value in config.items() if value is True]
    given = {name: value for name, value in config.items() if not isinstance(value, bool)}
    found = looks({**given, "device": "cuda"}, tmp_path / "out", monkeypatch, *switches)
    assert_whole(found)
    assert max(look["unattributed"] / look["allocated"] for look in found) < 0.05
    gib = 1 << 30
    # 1.42 G parameters, in half precision or in 8 bits; the student has half of the blocks, in float32.
    student = max(look["student"] for look in found)
    assert 2.5 * gib < student < 3.5 * gib
    assert all(look["optimizer"] == pytest.approx(2 * look["student"], rel=0.02) for look in found)
    assert 0.5 * student < max(look["gradients"] for look in found) < 1.01 * student
    assert max(look["activations"] for look in found) > 0
    if settings["teacher_device_strategy"] == "stream":
        assert all(look["teacher"] == 0 and look["slots"] > 0.1 * gib for look in found)
    else:
        assert all(gib < look["teacher"] < 3 * gib for look in found)
