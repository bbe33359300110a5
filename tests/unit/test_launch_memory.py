"""`wandistill launch` where memory runs out: real limits with the kernel's own kills, and the next placement."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import below, launch, start, termination

import wandistill
from wandistill.config import from_mapping
from wandistill.launch import state
from wandistill.launch.question import Question
from wandistill.planner.request import Machines

MIB, GIB = 2**20, 2**30
CGROUPS = Path("/sys/fs/cgroup/memory")
TEACHER = Path(wandistill.__file__).parent / "demo" / "teacher"
needs_cgroups = pytest.mark.skipif(
    not (CGROUPS / "memory.oom_control").exists() or os.getuid() != 0, reason="takes root and cgroup version 1"
)


@pytest.fixture
def limited() -> Iterator[tuple[str, ...]]:
    """What to put before a command so that it and its children may take 256 MiB together."""
    folder = CGROUPS / f"wandistill-test-{os.getpid()}"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(256 * MIB))
    yield ("sh", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "sh")
    while (folder / "cgroup.procs").read_text():
        time.sleep(0.05)
    folder.rmdir()


GROW = """
tell("teacher")
meet(2)
taken = []
while rank == 1:
    taken.append(b"x" * (4 << 20))
    time.sleep({pause})
time.sleep(60)
"""


@needs_cgroups
def test_a_rank_that_the_kernel_kills_at_the_limit_is_named_and_the_code_is_1(limited, tmp_path):
    code, printed = launch(tmp_path, GROW.format(pause=0), "--host_memory_stop", "1", prefix=limited)
    assert code == 1, printed
    found = json.loads((tmp_path / "run" / "oom.json").read_text())
    assert (found["kind"], found["rank"], found["phase"]) == ("cgroup", 1, "teacher")
    assert "rank 1: the kernel killed it for the memory limit" in printed
    assert all(memory["host_limit_bytes"] == 256 * MIB for memory in found["ranks"])
    assert termination(tmp_path)["rank"] == 1


@needs_cgroups
def test_the_ranks_are_ended_before_the_limit_is_hit(limited, tmp_path):
    code, printed = launch(tmp_path, GROW.format(pause=0.05), "--host_memory_stop", "0.6", prefix=limited)
    assert code == 1, printed
    assert "stopped before the memory limit was hit" in printed
    kills = (CGROUPS / f"wandistill-test-{os.getpid()}" / "memory.oom_control").read_text()
    assert kills.split()[-2:] == ["oom_kill", "0"]


def question() -> dict[str, Any]:
    """A run that shares a node's memory between two ranks, each with a teacher of its own."""
    config = from_mapping(
        {
            "teacher_device_strategy": "gpu",
            "teacher_dtype": "float32",
            "device": "cpu",
            "resolution": "256x256",
            "batch_size": 32,
            "gradient_accumulation_steps": 1,
        }
    )
    machines = Machines(gpu=None, ranks=2, nodes=1, host_memory=16 * GIB, cores=2)
    return Question(config, str(TEACHER), machines).to_json()


# A try whose memory runs out, as long as the placement was changed fewer times than `enough`.
TRIES = """
import json
from wandistill.launch import state
records.write(f"question-{{rank}}.json", json.loads({question!r}))
tell("student")
if len(state.replans(output_dir)) >= {enough}:
    leave(0)
meet({ranks})
if rank == 0:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGBUS)
time.sleep(60)
"""


def tries(enough: int, ranks: int = 2) -> str:
    return TRIES.format(question=json.dumps(question()), enough=enough, ranks=ranks)


def test_replanning_starts_again_with_another_placement_and_records_it(tmp_path):
    code, printed = launch(tmp_path, tries(1), "--on_oom", "replan", "--batch_size", "32")
    assert code == 0, printed
    (change,) = state.replans(tmp_path / "run")
    assert change["asked"]["batch_size"] == 32
    assert change["changes"]["teacher_device_strategy"] in printed
    assert set(change["changes"]) <= set(change["asked"])
    assert printed.count("OUT OF MEMORY") == 1


def test_replanning_ends_after_max_replans_and_never_tries_the_same_twice(tmp_path):
    code, printed = launch(tmp_path, tries(9), "--on_oom", "replan", "--max_replans", "2")
    assert code == 1, printed
    assert "--max_replans 2 are used up" in printed
    assert printed.count("OUT OF MEMORY") == 3
    first, second = (entry["changes"] for entry in state.replans(tmp_path / "run"))
    assert first != second


def test_without_replanning_the_report_has_the_commands_and_the_code_is_1(tmp_path):
    code, printed = launch(tmp_path, tries(1), "--seed", "7")
    assert code == 1, printed
    found = json.loads((tmp_path / "run" / "oom.json").read_text())
    assert found["plan"]["placement"] == "gpu" and found["advice"]
    commands = [one["command"] for one in found["advice"]]
    assert all(one.startswith("wandistill launch --nproc 2 -- ") and "--seed 7" in one for one in commands), commands
    assert state.replans(tmp_path / "run") == []


def test_of_several_nodes_all_end_to_be_started_again_and_read_the_new_placement(tmp_path):
    place = ["--nproc", "1", "--nnodes", "2", "--master_addr", "localhost", "--node_rank"]
    first = start(tmp_path, tries(1, ranks=1), "--on_oom", "replan", node=[*place, "0"])
    printed, _ = first.communicate(timeout=60)
    assert first.returncode == 138, printed
    assert "all nodes end, to start again with the new placement" in printed
    # The other node's rank followed the alarm, and reads the same directory.
    other = start(tmp_path, "leave(1, 'memory ran out on rank 0')", "--on_oom", "replan", node=[*place, "1"])
    (tmp_path / "run" / "oom.json").write_text(
        json.dumps({**json.loads((tmp_path / "run" / "oom.json").read_text()), "time": time.time() + 60})
    )
    printed, _ = other.communicate(timeout=60)
    assert other.returncode == 138, printed
    assert "rank 0 of another node ran out of memory" in printed
    assert len(state.replans(tmp_path / "run")) == 1


def test_a_node_knows_its_own_ranks_where_nodes_have_unlike_numbers_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_FIRST_RANK", "1")  # node 0 has one rank, this one two
    place = ["--nproc", "2", "--nnodes", "2", "--master_addr", "localhost", "--node_rank", "1"]
    behaviour = tries(1).replace("rank == 0", "rank == 1")
    process = start(tmp_path, behaviour, "--on_oom", "replan", node=place)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 138, printed
    assert json.loads((tmp_path / "run" / "oom.json").read_text())["rank"] == 1
    assert len(state.replans(tmp_path / "run")) == 1, printed


def test_a_try_that_was_killed_whole_is_replanned_by_the_next_start(tmp_path):
    process = start(tmp_path, tries(1).replace("os.kill(os.getpid(), signal.SIGBUS)", "time.sleep(60)"))
    file = state.StateFile(tmp_path / "run", 0)
    deadline = time.monotonic() + 60
    while not (found := file.last()) or found.question is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for pid in (process.pid, *below(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    code, printed = launch(tmp_path, tries(1), "--on_oom", "replan")
    assert code == 0, printed
    assert "try 1 has no end" in printed
    assert len(state.replans(tmp_path / "run")) == 1
