"""The memory limit is that of the cgroup, of either version, in a container and outside; a real one where possible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wandistill.launch.cgroup import Limit, MemoryCgroup

GIB = 2**30


def make_v1(root: Path, *, limit: int, usage: int, inactive: int = 0, kills: int = 0) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (root / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (root / "memory.stat").write_text(f"cache 5\ninactive_file {inactive}\n")
    (root / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")


def make_v2(root: Path, *, limit: str, usage: int, inactive: int = 0, kills: int = 0) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / "memory.max").write_text(f"{limit}\n")
    (root / "memory.current").write_text(f"{usage}\n")
    (root / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    (root / "memory.events").write_text(f"low 0\nhigh 0\nmax 3\noom 1\noom_kill {kills}\noom_group_kill 0\n")


def own(tmp_path: Path, membership: str) -> MemoryCgroup | None:
    (tmp_path / "membership").write_text(membership)
    return MemoryCgroup.own(tmp_path / "membership", tmp_path / "mounts")


def test_version_1_as_a_container_shows_it_whose_outside_name_is_not_there(tmp_path):
    make_v1(tmp_path / "mounts" / "memory", limit=8 * GIB, usage=7 * GIB, inactive=2 * GIB, kills=2)
    group = own(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/kubepods/pod1/abc\n0::/\n")
    assert group is not None and group.version == 1
    assert group.tightest() == Limit(8 * GIB, 7 * GIB, 2 * GIB)
    assert group.tightest().used == 5 * GIB and group.tightest().room == 3 * GIB
    assert group.oom_kills() == 2


def test_version_2_takes_the_tightest_of_a_cgroup_and_its_ancestors(tmp_path):
    mounts = tmp_path / "mounts"
    make_v2(mounts / "kubepods", limit=str(16 * GIB), usage=15 * GIB)
    make_v2(mounts / "kubepods" / "pod1", limit=str(8 * GIB), usage=4 * GIB)
    make_v2(mounts / "kubepods" / "pod1" / "c", limit="max", usage=4 * GIB, kills=1)
    group = own(tmp_path, "0::/kubepods/pod1/c\n")
    assert group is not None and group.version == 2
    assert [limit.limit for limit in group.limits()] == [8 * GIB, 16 * GIB]
    assert group.tightest().room == GIB
    assert group.oom_kills() == 1


def test_no_limit_is_none(tmp_path):
    make_v1(tmp_path / "mounts" / "memory" / "a", limit=9223372036854771712, usage=GIB)
    group = own(tmp_path, "4:memory:/a\n")
    assert group is not None and group.tightest() is None


def test_a_machine_without_a_memory_controller_has_none(tmp_path):
    assert own(tmp_path, "0::/\n") is None
    assert MemoryCgroup.own(tmp_path / "missing") is None


V1 = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(
    not (V1 / "memory.oom_control").exists() or os.getuid() != 0, reason="takes root and cgroup version 1"
)
def test_the_kernel_kills_a_child_and_the_counter_tells():
    folder = V1 / f"wandistill-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(32 * 2**20))
        code = f"""
import os, subprocess, sys
from pathlib import Path
from wandistill.launch.cgroup import MemoryCgroup
(Path({str(folder)!r}) / "cgroup.procs").write_text(str(os.getpid()))
group = MemoryCgroup.own()
assert group.tightest().limit == 32 * 2**20 and group.oom_kills() == 0
child = subprocess.run([sys.executable, "-c", "b'x' * (256 << 20)"])
print(child.returncode, group.oom_kills())
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == ["-9", "1"], done.stderr
    finally:
        folder.rmdir()
