"""`wandistill launch` with real torchrun and ranks: several nodes, and the kernel's own kill at a real memory limit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import below
from runs import ENVIRONMENT, SHORT, flags, here, losses

from wandistill.demo.captions import training_prompts

pytestmark = pytest.mark.slow

MEMORY = Path("/sys/fs/cgroup/memory")
# Takes memory beside the ranks until the kernel kills one of them, and then no more.
NEIGHBOUR = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "cgroup.procs").write_text(str(os.getpid()))
kills = lambda: int((folder / "memory.oom_control").read_text().split()[-1])
taken, before = [], kills()
while kills() == before:
    taken.append(bytearray(os.urandom(4096)) * 256)
    time.sleep(0.002)
print("killed", flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Data and caches that all runs of this file share."""
    folder = tmp_path_factory.mktemp("launched")
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(training_prompts(16)))
    settings = {**SHORT, "data_path": prompts, "cache_dir": folder / "cache", "rollout_steps": 2, "batch_size": 1}
    assert here(["prepare", *flags({**settings, "output_dir": folder / "prepare"})]) == 0
    return settings


def launch(
    node: list[str], settings: dict[str, object], log: Path, prefix: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    command = [*prefix, sys.executable, "-m", "wandistill", "launch", *node, "--", *flags(settings)]
    with log.open("a") as file:
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def wait_for_steps(output: Path, steps: int, *processes: subprocess.Popen[bytes], seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    log = output / "metrics.jsonl"
    while not log.exists() or log.read_text().count("\n") < steps:
        assert all(process.poll() is None for process in processes), "a launcher ended early"
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def nodes(shared: dict[str, object], tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two nodes of one rank each, in the middle of a run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    settings = {**shared, "output_dir": tmp_path / "run", "max_steps": 100000, "checkpoint_interval": 100000}
    place = ["--nproc", "1", "--nnodes", "2", "--master_addr", "127.0.0.1", "--master_port", port, "--node_rank"]
    found = [launch([*place, str(number)], settings, tmp_path / f"log-{number}") for number in (0, 1)]
    wait_for_steps(tmp_path / "run", 3, *found)
    yield found
    for process in found:
        for pid in [process.pid, *below(process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def test_sigterm_at_one_node_stops_all_at_the_same_step_saved(nodes, tmp_path):
    nodes[1].terminate()
    assert [process.wait(60) for process in nodes] == [143, 143]
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    steps = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert saved.name == f"step-{json.loads(steps[-1])['step']}"


def test_the_peers_of_a_lost_node_leave_with_138_within_a_minute(nodes, tmp_path):
    for pid in [nodes[1].pid, *below(nodes[1].pid)]:
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    assert nodes[0].wait(60) == 138, (tmp_path / "log-0").read_text()[-3000:]
    assert time.monotonic() - began < 60
    assert "rank 1" in (tmp_path / "log-0").read_text()


@pytest.fixture
def limited() -> Iterator[Path]:
    """A cgroup whose memory is limited."""
    if not (MEMORY / "memory.oom_control").exists() or os.getuid() != 0:
        pytest.skip("takes root and cgroup version 1")
    folder = MEMORY / f"wandistill-test-{os.getpid()}"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(6 << 30))
    yield folder
    for pid in (folder / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    while (folder / "cgroup.procs").read_text():
        time.sleep(0.1)
    folder.rmdir()


@pytest.mark.timeout(1800)
def test_a_rank_killed_by_the_kernel_at_the_limit_is_named_and_replanning_finishes_with_the_same_losses(
    shared, limited, tmp_path
):
    settings = {
        **shared,
        "resolution": "128x128",
        "batch_size": 16,
        "max_steps": 24,  # so that it still goes on when the neighbour, beside four ranks, has taken what is left
        "checkpoint_interval": 2,
        "host_memory_stop": 1,  # else the launcher may be quicker than the kernel
        "teacher_device_strategy": "gpu",
        "cache_dir": tmp_path / "cache",
    }
    inside = ("sh", "-c", f'echo $$ > {limited}/cgroup.procs; exec "$@"', "sh")

    straight = launch(["--nproc", "4"], {**settings, "output_dir": tmp_path / "straight"}, tmp_path / "log-straight")
    assert straight.wait(900) == 0, (tmp_path / "log-straight").read_text()[-3000:]

    def killed(output: Path, log: Path, *more: str) -> tuple[subprocess.Popen[bytes], subprocess.Popen[str], float]:
        run = launch(["--nproc", "4"], {**settings, "output_dir": output, **dict([more] if more else [])}, log, inside)
        wait_for_steps(output, 3, run)
        for pid in below(run.pid):
            if b"wandistill.train.agent" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                Path(f"/proc/{pid}/oom_score_adj").write_text("500")  # before the neighbour, the launcher and torchrun
        neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(limited)], stdout=subprocess.PIPE, text=True)
        assert neighbour.stdout is not None and neighbour.stdout.readline() == "killed\n"
        return run, neighbour, time.monotonic()

    run, neighbour, began = killed(tmp_path / "stopped", tmp_path / "log")
    assert run.wait(60) == 1
    assert time.monotonic() - began < 60
    neighbour.kill()
    neighbour.wait()
    printed = (tmp_path / "log").read_text()
    report = json.loads((tmp_path / "stopped" / "oom.json").read_text())
    assert report["kind"] == "cgroup" and report["rank"] in range(4)
    assert printed.count("OUT OF MEMORY") == 1 and f"rank {report['rank']}" in printed
    assert [memory["rank"] for memory in report["ranks"]] == [0, 1, 2, 3]

    run, neighbour, _ = killed(tmp_path / "replanned", tmp_path / "log-replanned", "on_oom", "replan")
    assert run.wait(900) == 0, (tmp_path / "log-replanned").read_text()[-5000:]
    neighbour.kill()
    neighbour.wait()
    assert losses(tmp_path / "replanned") == pytest.approx(losses(tmp_path / "straight"), rel=1e-5)
    record = json.loads((tmp_path / "replanned" / "run.json").read_text())
    assert record["replans"] and record["state"] == "finished"
