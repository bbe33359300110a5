"""A rank that is killed, or runs out of memory, ends the whole run within a minute; the run says which one it was."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from pathlib import Path

import pytest
from failing_rank import runs_out
from ranks import Ranks
from runs import SHORT, flags, here

from wandistill.demo.captions import training_prompts
from wandistill.launch.command import parse_train

SECONDS = 60
# The others are the same for what is tested here; they run in `make test-slow`.
QUICK = ("gpu", "balanced")
PLACEMENTS = ("gpu", "balanced", "gpu0", "sequential", "sharded", "stream", "offload", "disk", "cpu")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Data and caches that all runs of this file share."""
    folder = tmp_path_factory.mktemp("lost")
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(training_prompts(8)))
    settings = {
        **SHORT,
        "data_path": prompts,
        "cache_dir": folder / "cache",
        "rollout_steps": 2,
        "max_steps": 100000,
        "batch_size": 1,
    }
    assert here(["prepare", *flags({**settings, "output_dir": folder / "prepare"})]) == 0
    return settings


def begun(ranks: Ranks, output: Path, steps: int) -> None:
    """Waits until the run has taken so many steps."""
    log = output / "metrics.jsonl"
    ranks.wait_for(log)
    while log.read_text().count("\n") < steps:
        assert all(process.exitcode is None for process in ranks.processes), ranks.log.read_text()[-3000:]
        time.sleep(0.02)


@pytest.mark.parametrize(
    "placement", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PLACEMENTS]
)
def test_a_rank_killed_in_a_step_ends_the_run_which_names_it(placement, shared, tmp_path):
    settings = {**shared, "output_dir": tmp_path / "run", "teacher_device_strategy": placement}
    ranks = Ranks(2, flags(settings), tmp_path / "log")
    begun(ranks, tmp_path / "run", 3)
    killed = ranks.processes[1].pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    began = time.monotonic()
    codes = ranks.wait(SECONDS)
    assert codes == [138, -9], ranks.log.read_text()[-3000:]
    assert time.monotonic() - began < SECONDS
    assert "rank 1 is gone in the middle of the run" in ranks.log.read_text()


def test_memory_that_runs_out_on_one_rank_ends_all_after_one_report_of_all(shared, tmp_path):
    output = tmp_path / "run"
    settings = {**shared, "output_dir": output, "batch_size": 2, "teacher_device_strategy": "gpu"}
    ranks = Ranks(2, flags(settings), tmp_path / "log", before=runs_out)
    began = time.monotonic()
    codes = ranks.wait(SECONDS + 60)  # the start takes its time too
    assert codes == [1, 1], ranks.log.read_text()[-3000:]
    assert time.monotonic() - began < SECONDS + 60
    printed = ranks.log.read_text()
    assert printed.count("OUT OF MEMORY (host): rank 1, in phase teacher: DefaultCPUAllocator") == 1
    report = json.loads((output / "oom.json").read_text())
    assert (report["kind"], report["rank"], report["phase"]) == ("host", 1, "teacher")
    assert [memory["rank"] for memory in report["ranks"]] == [0, 1]
    assert all(memory["host_rss_bytes"] > 100 << 20 for memory in report["ranks"])
    assert report["plan"]["placement"] == "gpu" and report["plan"]["predicted_bytes"] > 0
    for one in report["advice"]:
        words = shlex.split(one["command"])
        assert words[:4] == ["torchrun", "--nproc_per_node=2", "-m", "wandistill.train"]
        parse_train(words[4:])
