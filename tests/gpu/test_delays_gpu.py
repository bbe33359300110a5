"""On a GPU copies and compute run beside each other: late ones change no number."""

from __future__ import annotations

import json
import socket
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

# For `placement_world`, which is beside the tests of CPUs.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")

from delays import delayed, equal_steps, no_order  # noqa: E402
from engine_setup import Setting, place, resident, setting  # noqa: E402
from placement_world import start_rank  # noqa: E402
from tiny_wan import LAYOUTS, build_tiny_wan  # noqa: E402

from wandistill.models.wan import open_teacher  # noqa: E402
from wandistill.train import distributed  # noqa: E402
from wandistill.train.distributed import World  # noqa: E402


@pytest.fixture
def on_gpu(tmp_path: Path) -> Setting:
    folder = open_teacher(str(build_tiny_wan(LAYOUTS["t2v-a14b"], tmp_path / "teacher")))
    world = World(0, 1, 0, 1, torch.device("cuda", 0))
    return replace(setting(folder, tmp_path / "run", torch.bfloat16), world=world)


@pytest.mark.parametrize("placement", ["stream", "offload", "disk"])
def test_a_thousand_steps_with_delays_equal_resident_compute_to_the_bit(placement: str, on_gpu: Setting) -> None:
    ours, reference = place(placement, on_gpu), resident(on_gpu)
    with delayed(on_gpu.world.device, seed=1):
        assert all(equal_steps(on_gpu.folder, ours, reference, 1000))
    ours.close()


@pytest.mark.parametrize("placement", ["stream", "offload"])
def test_a_slot_that_is_filled_while_it_is_computed_with_is_noticed(placement: str, on_gpu: Setting) -> None:
    ours, reference = place(placement, on_gpu), resident(on_gpu)
    with delayed(on_gpu.world.device, seed=1), no_order():
        assert not all(equal_steps(on_gpu.folder, ours, reference, 100))
    ours.close()


def late_rank(rank: int, port: int, teacher: Path, output: Path, device: str, steps: int, ordered: bool) -> None:
    """What one of two ranks that share the fetch does: it writes whether each step equals resident compute."""
    world = start_rank(rank, 2, 1, port, device)
    of = replace(setting(open_teacher(str(teacher)), output, torch.bfloat16, stream_fetch="split"), world=world)
    ours, reference = place("stream", of), resident(of)
    with delayed(world.device, seed=rank), nullcontext() if ordered else no_order():
        equal = list(equal_steps(of.folder, ours, reference, steps))
    (output / f"{rank}.json").write_text(json.dumps(equal), encoding="utf-8")
    ours.close()
    distributed.stop()


def two_late_ranks(folder: Path, device: str, steps: int, *, ordered: bool) -> list[bool]:
    """Whether the steps of both ranks equal resident compute."""
    teacher = build_tiny_wan(LAYOUTS["t2v-a14b"], folder / "teacher")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    torch.multiprocessing.spawn(late_rank, (port, teacher, folder, device, steps, ordered), nprocs=2)
    return [equal for rank in range(2) for equal in json.loads((folder / f"{rank}.json").read_text())]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no second GPU")
def test_two_ranks_that_share_the_fetch_equal_resident_compute_however_late_each_is(tmp_path: Path) -> None:
    assert all(two_late_ranks(tmp_path, "cuda", 1000, ordered=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no second GPU")
def test_a_part_that_a_peer_reads_too_early_is_noticed(tmp_path: Path) -> None:
    assert not all(two_late_ranks(tmp_path, "cuda", 100, ordered=False))
