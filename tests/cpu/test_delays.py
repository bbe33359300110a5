"""A teacher that comes block by block gives the same numbers however late its copies, reads and compute are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from delays import delayed, equal_steps, no_order
from engine_setup import place, resident, setting

from wandistill.models.wan import WanFolder, open_teacher

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tiny_wan: Callable[[str], Path]) -> WanFolder:
    return open_teacher(str(tiny_wan("t2v-a14b")))


@pytest.mark.parametrize("placement", ["stream", "disk"])
def test_a_thousand_steps_with_delays_equal_resident_compute_to_the_bit(
    placement: str, folder: WanFolder, tmp_path: Path
) -> None:
    of = setting(folder, tmp_path)
    ours, reference = place(placement, of), resident(of)
    with delayed(CPU, seed=1):
        assert all(equal_steps(folder, ours, reference, 1000))
    ours.close()


def test_a_buffer_that_is_filled_while_it_is_computed_with_is_noticed(folder: WanFolder, tmp_path: Path) -> None:
    of = setting(folder, tmp_path)
    ours, reference = place("disk", of), resident(of)
    with delayed(CPU, seed=1), no_order():
        assert not all(equal_steps(folder, ours, reference, 100))
    ours.close()
