"""One host copy for all ranks of a node: shared, no larger than the teacher, gone with the ranks, honest about room."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_setup import answers, asks, enlarge, place, resident, same, setting
from process_memory import occupied_bytes

from wandistill.errors import ConfigError, DoesNotFit
from wandistill.launch.memory import available_bytes
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.teacher import host_copy
from wandistill.teacher.cpu import core_share
from wandistill.teacher.host_copy import SharePlace
from wandistill.teacher.layout import Precision, TeacherLayout
from wandistill.teacher.record_reader import RecordReader

RANKS = 2


@pytest.fixture
def folder(tiny_wan: Callable[[str], Path]) -> WanFolder:
    return open_teacher(str(tiny_wan("t2v-a14b")))


def copy_bytes(folder: WanFolder) -> int:
    layout = TeacherLayout.of(
        folder.experts, folder.transformer_config, Precision.of(torch.float32, torch.device("cpu"))
    )
    return sum(layout.layout_of(record).size for record in layout.records)


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory that is too small for any teacher."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"this user may not mount a file system: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


class Ranks:
    """The processes of tests/host_copy_world.py."""

    def __init__(self, small: Path, large: Path, output_dir: Path) -> None:
        self._folder = large
        program = Path(__file__).parents[1] / "host_copy_world.py"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(program), str(small), str(large), str(output_dir)],
                env={**os.environ, **{k: str(v) for k, v in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def hear(self, said: str) -> None:
        """Waits until every rank has said it."""
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == said

    def go_on(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    def memory(self) -> int:
        """Bytes that all ranks occupy together."""
        return occupied_bytes([process.pid for process in self._processes], self._folder)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def test_ranks_share_one_copy_while_they_load_and_after_and_leave_nothing_when_killed(
    tiny_wan: Callable[[str], Path], tmp_path: Path
) -> None:
    small = tiny_wan("t2v-1.3b")
    large = Path(shutil.copytree(small, tmp_path / "large"))
    enlarge(large, shard="40MB", num_layers=32, num_attention_heads=4, attention_head_dim=96, ffn_dim=1024)
    size = copy_bytes(open_teacher(str(large)))
    assert size > 240 << 20
    owner = SharePlace.of(setting(open_teacher(str(large)), tmp_path / "run").config).owner

    ranks = Ranks(small, large, tmp_path / "run")
    try:
        ranks.hear("ready")
        before = ranks.memory()
        ranks.go_on()
        deadline, peak = time.monotonic() + 300, before
        while peak < before + 0.98 * size and time.monotonic() < deadline:
            peak = max(peak, ranks.memory())
            time.sleep(0.25)  # a reading halts the ranks: on a busy machine for longer than they ran
        ranks.hear("done")
        after = ranks.memory()
    finally:
        ranks.kill()
    assert after - before >= 0.98 * size
    assert max(peak, after) - before <= 1.05 * size
    assert [file.name for file in Path("/dev/shm").iterdir() if owner in file.name] == []


def test_closing_gives_the_memory_back(folder: WanFolder, tmp_path: Path) -> None:
    def every() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/wandistill-" in line]

    def mapped() -> list[str]:
        return [line for line in every() if line not in others]

    others = every()  # of teachers of former tests that are not collected yet

    for name in ("cpu", "stream", "offload", "disk"):
        teacher = place(name, setting(folder, tmp_path))
        answers(teacher, asks(folder))
        assert len(mapped()) == 1 and "(deleted)" in mapped()[0], "it has lost its name"
        teacher.close()
        assert mapped() == []


def test_what_a_killed_try_left_is_removed_and_what_is_alive_stays(folder: WanFolder, tmp_path: Path) -> None:
    of = setting(folder, tmp_path / "run", share_dir=str(tmp_path))
    place_of = SharePlace.of(of.config)
    dead = tmp_path / f"wandistill-none-{place_of.owner}-0-1"
    alive = tmp_path / f"wandistill-none-{place_of.owner}-0-2"
    other_run = tmp_path / "wandistill-none-000000000000-0-3"
    other_node = tmp_path / f"wandistill-none-{place_of.owner}-1-4"
    for file in (dead, alive, other_run, other_node):
        file.write_bytes(b"x")
    with alive.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        place("cpu", of).close()
    assert sorted(tmp_path.glob("wandistill-*")) == sorted([alive, other_run, other_node])


def test_a_share_dir_without_room_names_bytes_and_setting(
    folder: WanFolder, tmp_path: Path, small_mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = setting(folder, tmp_path, share_dir=str(small_mount))
    said = rf"needs {copy_bytes(folder)} bytes .*{small_mount} has 65536 .*free: give another directory as --share_dir"
    with pytest.raises(DoesNotFit, match=said):
        place("cpu", of)
    # Room that was there when it was looked for is gone when it is taken.
    free = host_copy._free_bytes
    answers_of_free = iter([1 << 40])
    monkeypatch.setattr(host_copy, "_free_bytes", lambda path: next(answers_of_free, free(path)))
    with pytest.raises(DoesNotFit, match=f"needs {copy_bytes(folder)} bytes"):
        place("cpu", of)
    assert list(small_mount.iterdir()) == []


def test_room_is_taken_while_what_has_room_is_read(
    folder: WanFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, read, begun = host_copy._reserve, RecordReader.read, threading.Event()

    def reserved(descriptor: int, span: tuple[int, int], *rest: Any) -> None:
        assert span[0] == 0 or begun.wait(30)
        reserve(descriptor, span, *rest)

    def reading(self: RecordReader, *args: Any) -> None:
        begun.set()
        read(self, *args)

    monkeypatch.setattr(host_copy, "_reserve", reserved)
    monkeypatch.setattr(RecordReader, "read", reading)
    place("cpu", setting(folder, tmp_path)).close()
    assert begun.is_set()


def test_a_share_dir_that_is_not_there_is_named(folder: WanFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--share_dir .*/nowhere: No such file"):
        place("cpu", setting(folder, tmp_path, share_dir=str(tmp_path / "nowhere")))


def test_memory_without_a_name_serves_where_only_dev_shm_is_small(
    folder: WanFolder, tmp_path: Path, small_mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copy, "_SHARED_MEMORY", small_mount)
    of = setting(folder, tmp_path)
    requests = asks(folder)
    teacher = place("cpu", of)
    assert "memfd:wandistill-" in Path("/proc/self/maps").read_text()
    assert same(answers(teacher, requests), answers(resident(of), requests))
    teacher.close()


def test_a_teacher_larger_than_the_memory_is_refused_with_what_to_do(
    folder: WanFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert available_bytes() > 1 << 20
    monkeypatch.setattr(host_copy, "available_bytes", lambda: 1000)
    with pytest.raises(DoesNotFit, match="1000 B are available here: take --teacher_device_strategy disk"):
        place("cpu", setting(folder, tmp_path))


def test_share_dir_holds_the_copy_while_the_run_lives(folder: WanFolder, tmp_path: Path) -> None:
    of = setting(folder, tmp_path / "run", share_dir=str(tmp_path))
    requests = asks(folder)
    teacher = place("cpu", of)
    assert f"{tmp_path}/wandistill-none-" in Path("/proc/self/maps").read_text()
    assert list(tmp_path.glob("wandistill-*")) == []
    assert same(answers(teacher, requests), answers(resident(of), requests))
    teacher.close()


@pytest.mark.parametrize(
    ("threads", "ranks", "environment", "expected"),
    [
        (6, 1, None, 6),
        (1, 2, "1", max(len(os.sched_getaffinity(0)) // 2, 1)),
        (1, 10**6, "1", 1),
        (3, 2, "3", 3),
    ],
    ids=["one rank keeps torch's own number", "torchrun's 1 becomes a share", "never none", "the user's number stays"],
)
def test_ranks_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, threads: int, ranks: int, environment: str | None, expected: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    assert core_share(threads, ranks) == expected
