"""The sums behind the figures of `wandistill evaluate`."""

from __future__ import annotations

import json
import math

import pytest
import torch

from wandistill.evaluate.measures import Distance, Stopwatch, VelocityErrors, finite_or_none
from wandistill.teacher.base import Expert


def test_velocity_errors_are_those_of_all_states_together():
    target, velocity = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
    errors = VelocityErrors(None)
    errors.add(0.3, Expert.HIGH, velocity[:2], target[:2])
    errors.add(0.9, Expert.HIGH, velocity[2:], target[2:])
    figures = errors.figures()
    assert figures["relative_l2"] == pytest.approx(((velocity - target).norm() / target.norm()).item(), rel=1e-6)
    assert figures["mse"] == pytest.approx((velocity - target).square().mean().item(), rel=1e-6)
    assert figures["target_mean_square"] == pytest.approx(target.square().mean().item(), rel=1e-6)
    assert figures["states"] == 6
    assert [row["states"] for row in figures["by_t"]] == [2, 4]


@pytest.mark.parametrize(
    ("t", "boundary", "expert", "start", "end"),
    [
        (1.0, None, Expert.HIGH, 0.875, 1.0),
        (0.0, None, Expert.HIGH, 0.0, 0.125),
        (0.125, None, Expert.HIGH, 0.125, 0.25),
        (0.95, 0.875, Expert.HIGH, 0.875, 1.0),
        (0.874, 0.875, Expert.LOW, 0.75, 0.875),
        (0.92, 0.9, Expert.HIGH, 0.9, 1.0),
        (0.89, 0.9, Expert.LOW, 0.875, 0.9),
    ],
)
def test_a_time_falls_into_its_eighth_cut_at_the_boundary(
    t: float, boundary: float | None, expert: Expert, start: float, end: float
):
    errors = VelocityErrors(boundary)
    errors.add(t, expert, torch.ones(1, 2), torch.ones(1, 2))
    (row,) = errors.figures()["by_t"]
    assert (row["t_from"], row["t_to"], row["expert"]) == (start, end, expert.value)


def test_rows_rise_in_t_with_the_low_expert_first():
    errors = VelocityErrors(0.9)
    for t, expert in ((0.95, Expert.HIGH), (0.89, Expert.LOW), (0.1, Expert.LOW)):
        errors.add(t, expert, torch.zeros(1, 2), torch.ones(1, 2))
    figures = errors.figures()
    assert [row["t_from"] for row in figures["by_t"]] == [0.0, 0.875, 0.9]
    assert {name: row["states"] for name, row in figures["by_expert"].items()} == {"transformer": 1, "transformer_2": 2}


def test_distances_do_not_depend_on_the_batches():
    teacher, student = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))
    for sizes in ([5], [2, 3], [1, 1, 1, 1, 1]):
        distance = Distance()
        for one, other in zip(teacher.split(sizes), student.split(sizes), strict=True):
            distance.add(one, other)
        assert distance.paired == pytest.approx((teacher - student).square().mean().sqrt().item(), rel=1e-6)
        neighbours = (teacher[1:] - teacher[:-1]).square().mean().sqrt().item()
        assert distance.unrelated == pytest.approx(neighbours, rel=1e-6)


def test_one_picture_has_no_neighbour():
    distance = Distance()
    distance.add(torch.ones(1, 2), torch.zeros(1, 2))
    assert distance.paired == 1.0 and math.isnan(distance.unrelated)


def test_the_first_batch_warms_up_unless_it_is_the_only_one():
    watch = Stopwatch(torch.device("cpu"), laps=[(10.0, 2)])
    assert watch.seconds_per_image == 5.0
    watch.laps += [(1.0, 2), (0.5, 1)]
    assert watch.seconds_per_image == 0.5


def test_what_json_cannot_hold_becomes_null():
    found = finite_or_none({"a": math.nan, "b": [math.inf, 1.5, {"c": -math.inf}], "d": 3, "e": "nan", "f": True})
    assert json.loads(json.dumps(found, allow_nan=False)) == {
        "a": None,
        "b": [None, 1.5, {"c": None}],
        "d": 3,
        "e": "nan",
        "f": True,
    }
