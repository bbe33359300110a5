"""Two runs do not write into one output directory, and one that was killed is in nobody's way."""

import dataclasses
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from launching import below, start

from wandistill.errors import ConfigError
from wandistill.launch import lock

HOLD = """
import sys, time
from pathlib import Path
from wandistill.launch import lock
with lock.held(Path(sys.argv[1]), "another"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds tmp_path/run."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def holder(run):
    return lock.Holder(**json.loads((run / lock.RUN).read_text()))


def seen_from_elsewhere(run):
    """The holder's note, as it looks on another machine."""
    note = dataclasses.asdict(dataclasses.replace(holder(run), machine="another kernel", host="node-7"))
    (run / lock.RUN).write_text(json.dumps(note))


def test_the_second_is_told_at_once_who_is_the_first_and_what_to_do(other, tmp_path):
    began = time.monotonic()
    with pytest.raises(ConfigError) as raised, lock.held(tmp_path / "run", "a test"):
        pytest.fail("both hold it")
    assert time.monotonic() - began < lock.PATIENCE / 4
    assert raised.value.exit_code == 2
    text = str(raised.value)
    assert f"--output_dir {tmp_path / 'run'}: another run writes there" in text
    assert f"process {other.pid} on host {socket.gethostname()}" in text and holder(tmp_path / "run").since in text
    assert "stop it, or give another --output_dir" in text


def test_a_holder_that_was_killed_is_in_nobody_s_way(other, tmp_path):
    other.send_signal(signal.SIGKILL)
    other.wait()
    began = time.monotonic()
    with lock.held(tmp_path / "run", "a test"):
        assert time.monotonic() - began < lock.PATIENCE / 4
        assert holder(tmp_path / "run").pid == os.getpid()


def test_it_is_free_after_the_end_and_after_an_error(tmp_path):
    with pytest.raises(ValueError, match="training failed"), lock.held(tmp_path / "run", "a test"):
        raise ValueError("training failed")
    with lock.held(tmp_path / "run", "a test"):
        pass
    with (
        lock.held(tmp_path / "run", "a test"),
        lock.held(tmp_path / "other", "a test"),
        lock.held(tmp_path / "run", "a test", lock.RANKS),
    ):
        pass


def test_a_holder_elsewhere_may_be_lost_with_its_machine_and_is_waited_for(other, tmp_path, caplog):
    seen_from_elsewhere(tmp_path / "run")
    threading.Timer(0.7, other.kill).start()
    with lock.held(tmp_path / "run", "a test"):
        assert holder(tmp_path / "run").pid == os.getpid()
    assert "on host node-7" in caplog.text and "waiting up to 120 s" in caplog.text


def test_a_holder_elsewhere_that_stays_is_another_run(other, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.2)
    seen_from_elsewhere(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"process {other.pid} on host node-7"), lock.held(tmp_path / "run", "a test"):
        pytest.fail("both hold it")


def test_ranks_wait_for_those_of_a_launcher_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.2)
    began = time.monotonic()
    with (
        lock.held(tmp_path / "run", "a test", lock.RANKS),
        pytest.raises(ConfigError),
        lock.held(tmp_path / "run", "a test", lock.RANKS),
    ):
        pytest.fail("both hold it")
    assert time.monotonic() - began > 0.2


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, caplog):
    def unsupported(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with lock.held(tmp_path / "run", "a test"):
        pass
    assert "knows no locks (No locks available)" in caplog.text


def test_a_directory_that_cannot_be_is_left_to_those_who_write_there(tmp_path):
    (tmp_path / "file").touch()
    with lock.held(tmp_path / "file" / "run", "a test"):
        pass


def test_any_user_who_may_write_the_directory_may_take_the_lock(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run").chmod(0o770)
    with lock.held(tmp_path / "run", "a test"):
        assert (tmp_path / "run" / lock.RUN).stat().st_mode & 0o777 == 0o660


def test_a_second_launcher_ends_with_2_and_leaves_the_first_one_s_state_alone(tmp_path):
    run = tmp_path / "run"
    wait = f"open({str(tmp_path / 'begun')!r}, 'w').close(); time.sleep(60)"
    first = start(tmp_path, wait, ranks=1)
    try:
        while not (tmp_path / "begun").exists():
            assert first.poll() is None
            time.sleep(0.05)
        state = json.loads((run / "launch" / "node-0.json").read_text())
        second = start(tmp_path, "leave(0)", ranks=1)
        printed, _ = second.communicate(timeout=60)
        assert second.returncode == 2, printed
        assert f"another run writes there, process {first.pid} on host" in printed
        found = json.loads((run / "launch" / "node-0.json").read_text())
        assert (found["number"], found["started"], found["ended"]) == (1, state["started"], None)
        # The other nodes of the job share the directory, and its node 0 has it for all.
        node = ["--nproc", "1", "--nnodes", "2", "--node_rank", "1", "--master_addr", "127.0.0.1"]
        peer = start(tmp_path, "leave(0)", node=node)
        printed, _ = peer.communicate(timeout=60)
        assert peer.returncode == 0, printed
        # Killed whole, it is in the way of nobody.
        processes = [first.pid, *below(first.pid)]
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        first.communicate()
        again = start(tmp_path, "leave(0)", ranks=1)
        printed, _ = again.communicate(timeout=60)
        assert "another run writes there" not in printed and again.returncode != 2, printed
    finally:
        for pid in [first.pid, *below(first.pid)] if first.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
