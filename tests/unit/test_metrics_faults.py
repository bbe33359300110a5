"""What may go wrong around a pod's endpoint: no scrape fails, no line is half, and series stay bounded."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from pod_endpoint import OPENMETRICS, figures, overwrite, samples, scrape, steps, tell
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from wandistill.metrics import snapshot
from wandistill.metrics.names import PHASES, series_names
from wandistill.metrics.pod import PodState, serve
from wandistill.metrics.steps import StepStatistics


def test_a_clock_that_jumps_moves_no_age_and_no_last_step(pod):
    _, folder, port = pod
    for jump in (3600.0, -3600.0):
        told = tell(folder, 0)
        # As if the snapshot had been written before the wall clock was set.
        told.wall -= jump
        told.samples["wandistill_rank_last_step_timestamp_seconds"] = [({}, told.wall - 7)]
        overwrite(folder, told)
        found = samples(port)
        assert found["wandistill_rank_snapshot_age_seconds"][0][1] < 5
        since = time.time() - found["wandistill_rank_last_step_timestamp_seconds"][0][1]
        assert 6 < since < 12


@pytest.mark.parametrize("name", ['a"b\\c\nd', "x" * 300, "ё{}=,#", ""])
def test_a_hostile_run_name_is_a_label_value_and_nothing_else(name, tmp_path):
    endpoint = serve(PodState(name, 'p"\n', 0), tmp_path, 0)
    try:
        tell(tmp_path, 0)
        assert samples(endpoint.port)["wandistill_step"][0][0]["run"] == name
        (step,) = [f for f in parse_openmetrics(scrape(endpoint.port, OPENMETRICS)) if f.name == "wandistill_step"]
        assert step.samples[0].labels["run"] == name
    finally:
        endpoint.close()


def test_half_files_foreign_files_and_lying_snapshots_cost_their_own_samples_only(pod):
    _, folder, port = pod
    good = tell(folder, 0)
    whole = (folder / "rank-0.json").read_text()
    (folder / "rank-1.json").write_text(whole[: len(whole) // 2])
    (folder / "rank-2.json").write_bytes(b"\xff\xfe\x00")
    (folder / "rank-3.json").write_text("[]")
    (folder / "rank-4.json").write_text(" " * (1 << 20))
    (folder / "rank-5.json").mkdir()
    (folder / "notes.txt").write_text("hello")
    good.rank = 6
    good.samples |= {
        "wandistill_loss": [({}, float("nan"))],
        "wandistill_no_such": [({}, 1)],
        "wandistill_rank_phase": [({"phase": "lunch"}, 1)],
        "wandistill_learning_rate": [({"extra": "label"}, 1)],
        "wandistill_gradient_norm": [({}, "much")],
        "wandistill_step_seconds": [({"part": "step"}, {"counts": [1], "sum": 1})],
        "wandistill_pod_exit_code": "no list",
        "wandistill_rank_snapshot_age_seconds": [({}, 7)],
    }
    assert snapshot.write(folder, good)
    found = samples(port)
    assert {labels["rank"] for labels, _ in found["wandistill_step"]} == {"0", "6"}
    assert len(found["wandistill_rank_snapshot_age_seconds"]) == 2
    assert {labels["rank"] for labels, _ in found["wandistill_gradient_norm"]} == {"0"}
    assert {labels["phase"] for labels, _ in found.get("wandistill_rank_phase", [])} <= set(PHASES)
    assert {labels["rank"] for labels, _ in found["wandistill_step_seconds_count"]} == {"0"}
    assert set(found) <= series_names()


def test_a_thousand_short_lived_ranks_leave_no_series_and_no_file(pod):
    _, folder, port = pod
    tell(folder, 0)
    before = scrape(port).count("\n")
    dead = tell(folder, 1)
    dead.pid_start = -1
    text = json.dumps(asdict(dead))
    for rank in range(1, 1001):
        (folder / f"rank-{rank}.json").write_text(text)
    tell(folder, 0)
    assert scrape(port).count("\n") == before
    assert len(list(folder.iterdir())) == 1


def test_a_full_disk_keeps_the_former_snapshot_whole(tmp_path, monkeypatch):
    told = tell(tmp_path, 0)
    before = (tmp_path / "rank-0.json").read_bytes()

    def full(self: Path, text: str, **_: object) -> int:
        with open(self, "w") as file:
            file.write(text[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert not snapshot.write(tmp_path, told)
    assert (tmp_path / "rank-0.json").read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    assert not snapshot.write(tmp_path / "nowhere", told)


def test_scrapes_during_a_rank_s_writes_and_deaths_see_whole_lines(pod):
    _, folder, port = pod
    stop = threading.Event()

    def churn() -> None:
        told = snapshot.mine(0, 0, 1)
        told.samples = steps().samples()
        while not stop.is_set():
            snapshot.write(folder, told)
            told.pid_start = -told.pid_start  # dead every other time

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(30):
            for family in parse_openmetrics(scrape(port, OPENMETRICS)):
                assert family.samples
    finally:
        stop.set()
        thread.join()


def test_a_name_that_is_no_text_and_values_that_are_no_numbers_cost_no_scrape(pod):
    """A file name of Linux is any bytes, which Python has as lone surrogates; JSON has numbers of any size."""
    _, folder, _ = pod
    endpoint = serve(PodState("run-\udcff", "local", 0), folder, 0)
    try:
        tell(
            folder,
            wandistill_config_info=[
                ({"teacher": "/\udcff", "student": 7, "teacher_dtype": [], "resolution": None, "world_size": {}}, 1)
            ],
            wandistill_loss=[({}, 10**400)],
            wandistill_step_seconds=[({"part": "step"}, {"counts": [float("inf")] * 16, "sum": 1})],
        )
        found = samples(endpoint.port)
        assert found["wandistill_step"][0][0]["run"] == "run-?" and "wandistill_loss" not in found
        assert found["wandistill_config_info"][0][0]["teacher"] == "/?"
        assert list(parse_openmetrics(scrape(endpoint.port, OPENMETRICS)))
    finally:
        endpoint.close()


def test_a_snapshot_without_end_and_one_of_another_s_rank_are_passed_over(pod):
    _, folder, port = pod
    tell(folder, 0)
    (folder / "rank-1.json").write_text("[" * 100_000)
    (folder / "rank-2.json").write_text((folder / "rank-0.json").read_text())
    assert [labels["rank"] for labels, _ in samples(port)["wandistill_step"]] == ["0"]


def test_ranks_of_a_thousand_numbers_that_come_and_go_keep_the_series_bounded(pod):
    state, folder, port = pod
    state.count_oom("cuda", 0, "train")
    for first in range(1, 1001, 125):
        for path in folder.iterdir():
            path.unlink()
        for rank in range(first, first + 125):
            tell(folder, rank, wandistill_step_seconds=[])
        scrape(port)
    scraped = samples(port)["wandistill_oom_events_total"]
    assert {labels["rank"] for labels, _ in scraped} == {"0", *map(str, range(1001 - 255, 1001))}
    assert sum(value for _, value in scraped) == 1
    # One that has just died is still there, for the event that its death may be.
    state.count_oom("cgroup", 1000, "train")
    again = samples(port)["wandistill_oom_events_total"]
    assert [labels for labels, _ in again] == [labels for labels, _ in scraped]


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from pod_endpoint import steps
from wandistill.metrics import snapshot
told = snapshot.mine({rank}, {rank}, 0)
told.samples = steps().samples()
while True:
    snapshot.write(Path({folder!r}), told)
"""


def test_ranks_that_are_killed_while_they_write_leave_whole_scrapes_and_no_file(pod):
    """Real processes, killed with SIGKILL at any point of a write, several of each rank, while scrapes go on."""
    _, folder, port = pod
    tests = str(Path(__file__).resolve().parents[1])
    context = multiprocessing.get_context("fork")
    seen: set[str] = set()
    stop = threading.Event()
    broken: list[BaseException] = []

    def scrapes() -> None:
        try:
            while not stop.is_set():
                for family in parse_openmetrics(scrape(port, OPENMETRICS)):
                    seen.update(sample.labels["rank"] for sample in family.samples if family.name == "wandistill_loss")
        except BaseException as error:
            broken.append(error)

    thread = threading.Thread(target=scrapes)
    thread.start()
    try:
        for number in range(40):
            code = WRITER.format(tests=tests, rank=number % 4, folder=str(folder))
            rank = context.Process(target=exec, args=(code, {}))
            rank.start()
            time.sleep(0.02 + 0.002 * number)
            assert rank.pid is not None
            os.kill(rank.pid, signal.SIGKILL)
            rank.join()
    finally:
        stop.set()
        thread.join()
    assert not broken and seen == {"0", "1", "2", "3"}
    assert "wandistill_loss" not in samples(port)
    assert list(folder.iterdir()) == []


FULL = """
import os, resource, subprocess, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from pod_endpoint import samples, tell
from wandistill.metrics import snapshot
from wandistill.metrics.pod import PodState, serve
folder = Path({folder!r})
{fill}
told = tell(folder, 0)
endpoint = serve(PodState("job", "pool", 0), folder, 0)
before = (folder / "rank-0.json").read_bytes()
fill()
told.samples["wandistill_step"] = [({{}}, 4)]
assert not snapshot.write(folder, told)
assert (folder / "rank-0.json").read_bytes() == before
assert samples(endpoint.port)["wandistill_step"][0][1] == 3
free()
assert sorted(path.name for path in folder.iterdir()) == ["rank-0.json"]
assert snapshot.write(folder, told)
assert samples(endpoint.port)["wandistill_step"][0][1] == 4
print("whole")
os._exit(0)
"""
# A file system that has no room left, and a limit that lets a write end in the middle.
MOUNTED = """
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=True)
def fill():
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 512): pass
        except OSError: pass
def free(): (folder / "filler").unlink()
"""
LIMITED = """
usual = resource.getrlimit(resource.RLIMIT_FSIZE)
def fill(): resource.setrlimit(resource.RLIMIT_FSIZE, (1000, usual[1]))
def free(): resource.setrlimit(resource.RLIMIT_FSIZE, usual)
"""


@pytest.mark.parametrize("fill", [MOUNTED, LIMITED], ids=["full file system", "limit in the middle of a write"])
def test_on_a_disk_that_is_full_the_former_snapshot_is_served_until_there_is_room_again(fill, tmp_path):
    own_mounts = ["unshare", "--map-root-user", "--mount"] if fill == MOUNTED else []
    if own_mounts and subprocess.run([*own_mounts, "true"], capture_output=True).returncode:
        pytest.skip("mounts of its own are not allowed here")
    tests = str(Path(__file__).resolve().parents[1])
    command = [*own_mounts, sys.executable, "-c", FULL.format(tests=tests, folder=str(tmp_path), fill=fill)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout == "whole\n", result.stderr[-2000:]


def test_a_clock_that_is_set_between_two_steps_moves_neither_pace_nor_the_time_since_the_last_step(monkeypatch):
    """A rank tells its last step by the clock as it is when it tells: alerts compare it with the time of then."""
    clock = {"monotonic": 1000.0, "wall": 5e8}
    monkeypatch.setattr(time, "monotonic", lambda: clock["monotonic"])
    monkeypatch.setattr(time, "time", lambda: clock["wall"])

    def pass_by(seconds: float, jump: float = 0.0) -> None:
        clock["monotonic"] += seconds
        clock["wall"] += seconds + jump

    statistics = StepStatistics(100)
    statistics.begin(0)
    for step in range(1, 6):
        pass_by(2, jump=(-1) ** step * 86_400)
        statistics.add(step, figures(), "high")
    assert statistics.median == 2
    pass_by(3, jump=7200)
    ((_, last),) = statistics.samples()["wandistill_rank_last_step_timestamp_seconds"]
    assert clock["wall"] - last == 3
    ((_, end),) = statistics.run_samples()["wandistill_predicted_end_timestamp_seconds"]
    assert end - last == 2 * 95
