"""`wandistill launch` with ranks that are small scripts: signals, ends, exit codes, and what the next start finds."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import below, launch, start, termination

from wandistill.launch import records, state
from wandistill.launch.launcher import MOST_IDLE
from wandistill.launch.memory import RankMemory


def test_ranks_that_finish_end_with_0(tmp_path):
    code, _ = launch(tmp_path, "leave(0)")
    assert code == 0
    assert termination(tmp_path)["exit_code"] == 0
    assert state.StateFile(tmp_path / "run", 0).last().ended is not None


@pytest.mark.parametrize(
    ("behaviour", "code", "said"),
    [
        ("leave(3, 'the loss is not finite') if rank else time.sleep(30)", 3, "the loss is not finite"),
        ("leave(2, 'a device map')", 2, "a device map"),
        ("leave(70, 'KeyError') if rank else (ended(1), leave(138, 'rank 1 is gone'))", 70, "KeyError"),
        ("leave(138, 'rank 5 is gone')", 138, "rank 5 is gone"),
        ("os.kill(os.getpid(), 9) if rank else time.sleep(30)", 138, "rank 1 was killed from outside, by SIGKILL"),
        ("os.kill(os.getpid(), 11) if rank else time.sleep(30)", 70, "rank 1 crashed with SIGSEGV"),
        ("os._exit(1) if rank else time.sleep(30)", 70, "no rank told why"),
    ],
)
def test_the_exit_code_tells_the_cause_and_the_message_the_rank(tmp_path, behaviour, code, said):
    found, printed = launch(tmp_path, behaviour)
    assert found == code, printed
    assert said in printed
    assert termination(tmp_path)["exit_code"] == code and said in termination(tmp_path)["message"]


def test_a_full_dev_shm_that_kills_by_sigbus_is_an_out_of_memory(tmp_path):
    code, printed = launch(tmp_path, "tell('teacher'); meet(2); os.kill(os.getpid(), 7) if rank else time.sleep(30)")
    assert code == 1
    found = json.loads((tmp_path / "run" / "oom.json").read_text())
    assert (found["kind"], found["rank"], found["phase"]) == ("shm", 1, "teacher")
    assert {memory["rank"] for memory in found["ranks"]} == {0, 1}
    assert printed.count("OUT OF MEMORY") == 1
    assert termination(tmp_path)["kind"] == "shm"


def test_a_report_that_a_rank_wrote_is_told_once_and_not_made_anew(tmp_path):
    behaviour = """
if rank == 1:
    from wandistill.launch.report import Command, OomReport, write
    from wandistill.launch.causes import Kind
    memory = [RankMemory(r, "student", 1 << 30, None, 1 << 30, 2 << 30, 3 << 30, 0) for r in (0, 1)]
    made = OomReport(Kind.CUDA, "CUDA out of memory. Tried to allocate 2.00 GiB", 1, Command(["x"], [], ""), memory)
    write(output_dir, made.to_json())
    leave(1, "CUDA out of memory")
while not (output_dir / "oom.json").exists():
    time.sleep(0.02)
leave(1, "memory ran out on rank 1")
"""
    code, printed = launch(tmp_path, behaviour)
    assert code == 1, printed
    assert printed.count("OUT OF MEMORY (cuda): rank 1, in phase student") == 1
    assert "rank 0, in phase student: 1.0 GiB allocated, 2.0 GiB reserved, 3.0 GiB total, 0 B free" in printed
    assert termination(tmp_path)["rank"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_ranks_alone_which_take_the_time_they_need_to_save(tmp_path, number):
    code = {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    behaviour = f"""
on_signal(signal.SIGTERM, lambda: leave(70, "torchrun was told"))
noted = []
on_signal(signal.{number.name}, lambda: noted.append(1))
(output_dir / f"ready-{{rank}}").touch()
while not noted:
    time.sleep(0.02)
time.sleep(1.5)
# From here on the agent ends this rank as soon as the other one has ended.
on_signal(signal.SIGTERM, lambda: None)
tell()
meet(2)
leave({code}, "saved")
"""
    process = start(tmp_path, behaviour)
    deadline = time.monotonic() + 30
    while len(list((tmp_path / "run").glob("ready-*"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == code, printed
    assert "saved" in printed


def test_a_signal_before_anything_could_be_saved_still_ends_with_143(tmp_path):
    process = start(tmp_path, "(output_dir / 'up').touch(); time.sleep(30)")
    deadline = time.monotonic() + 30
    while not (tmp_path / "run" / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143


def test_a_launcher_that_was_killed_with_its_ranks_is_noticed_by_the_next_start(tmp_path):
    process = start(tmp_path, "tell('teacher'); time.sleep(60)")
    file = state.StateFile(tmp_path / "run", 0)
    deadline = time.monotonic() + 30
    while not (found := file.last()) or len(found.ranks) < 2 or found.ranks[0]["phase"] != "teacher":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for pid in (process.pid, *below(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()

    code, printed = launch(tmp_path, "leave(0)")
    assert code == 1
    assert "try 1 has no end: it was probably killed whole" in printed
    assert "rank 1, in phase teacher" in printed
    assert termination(tmp_path)["reason"] == "out_of_memory"
    # It has been told; the same command may be tried again.
    assert launch(tmp_path, "leave(0)")[0] == 0


def test_what_a_run_has_asked_the_planner_is_noted_at_once_for_a_start_after_a_kill_of_all(tmp_path):
    behaviour = """
tell("teacher")
while not (output_dir / "noted").exists():
    time.sleep(0.02)
records.write(f"question-{rank}.json", {"config": {"teacher_device_strategy": "cpu"}})
time.sleep(60)
"""
    process = start(tmp_path, behaviour)
    file = state.StateFile(tmp_path / "run", 0)
    wait_for(lambda: (found := file.last()) and len(found.ranks) == 2)
    (tmp_path / "run" / "noted").touch()
    wait_for(lambda: file.last().question, seconds=1)
    process.terminate()
    process.communicate(timeout=30)


def wait_for(holds: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lost(tmp_path: Path, *, tries: int, step: int) -> None:
    """Leaves the state of a run whose last tries all lost a peer, after the checkpoint of `step`."""
    ended = state.Try(tries, time.time(), step, idle=tries).end(138, "rank 9 is gone")
    state.StateFile(tmp_path / "run", 0).write(ended)


def test_tries_that_leave_no_checkpoint_come_to_an_end(tmp_path):
    lost(tmp_path, tries=MOST_IDLE - 1, step=0)
    assert launch(tmp_path, "leave(138, 'rank 9 is gone')", ranks=1)[0] == 138
    assert state.StateFile(tmp_path / "run", 0).last().idle == MOST_IDLE
    code, printed = launch(tmp_path, "leave(0)", ranks=1)
    assert code == 3
    assert f"{MOST_IDLE} tries in a row ended without a new checkpoint, the last one with: rank 9 is gone" in printed


def test_a_new_checkpoint_begins_the_count_of_tries_anew(tmp_path):
    lost(tmp_path, tries=MOST_IDLE, step=10)
    (tmp_path / "run" / "checkpoints" / "step-20").mkdir(parents=True)
    assert launch(tmp_path, "leave(138, 'rank 9 is gone')", ranks=1)[0] == 138
    assert state.StateFile(tmp_path / "run", 0).last().idle == 1


def test_the_memory_of_a_rank_is_read_back_as_it_was_written():
    memory = RankMemory(3, "teacher", 5, 6, 1, 2, 4, 3)
    assert RankMemory.from_json(memory.to_json()) == memory


def test_the_first_record_of_an_end_stands(tmp_path, monkeypatch):
    monkeypatch.setenv(records.FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "2")
    records.leave(1, "memory")
    records.leave(138, "a peer")
    assert records.exits(tmp_path) == {2: records.ExitRecord(2, 1, "memory")}


@pytest.mark.parametrize(("number", "ranks"), [(0, [0]), (1, [])])
def test_after_the_last_step_node_0_needs_no_peers_and_the_others_have_nothing_to_do(tmp_path, number, ranks):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-8").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"steps": 8}))
    state.StateFile(run, number).write(state.Try(1, time.time(), 8))  # killed whole while it exported
    place = ["--nproc", "2", "--nnodes", "2", "--master_addr", "localhost", "--node_rank", str(number)]
    behaviour = "(output_dir / f'rank-{rank}').touch(); leave(0)"
    process = start(tmp_path, behaviour, node=place)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert sorted(path.name for path in run.glob("rank-*")) == [f"rank-{rank}" for rank in ranks]
