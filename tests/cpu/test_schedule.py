"""What a step trains on depends on seed, step and sample number, and on nothing else."""

from itertools import pairwise

import pytest
import torch

from wandistill.teacher.base import Expert
from wandistill.train.schedule import (
    draw_expert,
    draw_noise,
    draw_time,
    item_of,
    learning_rate,
    shifted,
    unshifted,
)

BOUNDARY, SHIFT = 0.875, 3.0


@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
def test_shift_and_its_inverse_undo_each_other_and_keep_the_ends(shift):
    assert shifted(0.0, shift) == 0 and shifted(1.0, shift) == 1
    for u in (0.1, 0.5, 0.9):
        assert unshifted(float(shifted(u, shift)), shift) == pytest.approx(u, abs=1e-12)


def test_the_experts_are_drawn_with_their_mass_after_the_shift():
    # Wan2.2's boundary of 0.875 at shift 3 lies at u = 0.7: 30 % of the draws are the high-noise expert's. A split at
    # u = 0.875 would give 12.5 %.
    draws = [draw_expert(0, step, BOUNDARY, SHIFT) for step in range(20_000)]
    assert sum(d is Expert.HIGH for d in draws) / len(draws) == pytest.approx(0.3, abs=0.01)


def test_times_stay_on_their_experts_side_and_follow_the_shifted_distribution():
    for expert in Expert:
        times = [draw_time(1, n, expert, BOUNDARY, SHIFT) for n in range(5000)]
        assert all((t >= BOUNDARY) == (expert is Expert.HIGH) for t in times)
    # Mixed by mass, half of all times lie below the time of u = 0.5, which is 0.75 at shift 3.
    times = [draw_time(2, n, draw_expert(2, n, BOUNDARY, SHIFT), BOUNDARY, SHIFT) for n in range(20_000)]
    assert sum(t < 0.75 for t in times) / len(times) == pytest.approx(0.5, abs=0.01)


def test_a_teacher_with_one_expert_draws_from_the_whole_of_t():
    assert {draw_expert(0, step, None, SHIFT) for step in range(100)} == {Expert.HIGH}
    times = [draw_time(0, n, Expert.HIGH, None, SHIFT) for n in range(5000)]
    assert min(times) < 0.02 and max(times) > 0.99


def test_noise_repeats_for_a_sample_and_differs_between_samples_and_seeds():
    shape = (16, 1, 8, 8)
    assert torch.equal(draw_noise(0, 5, shape), draw_noise(0, 5, shape))
    assert not torch.equal(draw_noise(0, 5, shape), draw_noise(0, 6, shape))
    assert not torch.equal(draw_noise(0, 5, shape), draw_noise(1, 5, shape))
    assert draw_noise(0, 5, shape).std().item() == pytest.approx(1, abs=0.1)


def test_every_epoch_passes_over_every_item_once_in_its_own_order():
    first, second = ([item_of(0, epoch * 50 + n, 50) for n in range(50)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_the_learning_rate_warms_up_and_falls_to_zero():
    rates = [learning_rate(step, 1000, 1.0, 100) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01) and max(rates) == 1.0 and rates.index(1.0) == 99
    assert rates[-1] < 1e-4
    assert all(a >= b for a, b in pairwise(rates[100:]))
