"""The container's memory is what the kernel's files say, cgroup versions 1 and 2."""

from __future__ import annotations

from pathlib import Path

from wandistill.launch.cgroup import MemoryCgroup
from wandistill.metrics.pod_memory import container_samples


def values(cgroup: MemoryCgroup, tmp_path: Path) -> dict[tuple[str, ...], float]:
    found = container_samples(cgroup, shm=tmp_path)
    return {(name.removeprefix("wandistill_pod_"), *labels.values()): value for name, labels, value in found}


def test_version_2_tells_usage_peak_limit_pressure_and_kills(tmp_path):
    files = {
        "memory.current": "1000\n",
        "memory.peak": "1500\n",
        "memory.max": "2000\n",
        "memory.stat": "anon 800\ninactive_file 100\n",
        "memory.events": "low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\n",
        "memory.pressure": ("some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0.00 total=500000\n"),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = values(MemoryCgroup(tmp_path, tmp_path, 2), tmp_path)
    size = found.pop(("shm_bytes", "size"))
    assert 0 <= found.pop(("shm_bytes", "used")) <= size
    assert found == {
        ("memory_bytes", "usage"): 1000,
        ("memory_bytes", "peak"): 1500,
        ("memory_bytes", "limit"): 2000,
        ("memory_pressure_seconds_total", "some"): 2.5,
        ("memory_pressure_seconds_total", "full"): 0.5,
        ("oom_kills_total",): 2,
    }


def test_version_1_leaves_out_pressure_and_an_absent_limit_and_peak(tmp_path):
    files = {
        "memory.usage_in_bytes": "1000\n",
        "memory.limit_in_bytes": "9223372036854771712\n",
        "memory.stat": "inactive_file 100\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = values(MemoryCgroup(tmp_path, tmp_path, 1), tmp_path)
    assert found[("memory_bytes", "usage")] == 1000 and found[("oom_kills_total",)] == 1
    assert not {("memory_bytes", "limit"), ("memory_bytes", "peak")} & set(found)


def test_here_usage_is_the_kernel_s_own_number(tmp_path):
    cgroup = MemoryCgroup.own()
    assert cgroup is not None
    name = "memory.usage_in_bytes" if cgroup.version == 1 else "memory.current"
    told = values(cgroup, tmp_path)[("memory_bytes", "usage")]
    assert abs(told - int((cgroup.folder / name).read_text())) < 0.05 * told
