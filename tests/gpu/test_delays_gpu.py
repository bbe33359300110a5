"""On a GPU copies and compute run beside each other: late ones change no number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")

from delays import delayed, equal_steps, no_order  # noqa: E402
from engine_setup import Setting, place, resident, setting  # noqa: E402
from tiny_wan import LAYOUTS, build_tiny_wan  # noqa: E402

from wandistill.models.wan import open_teacher  # noqa: E402
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
