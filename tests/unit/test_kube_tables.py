"""A table says of a combination what the planner says of it."""

import pytest

from wandistill.kube import tables, values
from wandistill.kube.pools import jobs, question
from wandistill.kube.sizing import sizes

VALUES = {
    "image": {"train": {"repository": "reg.example.com/wandistill"}},
    "output": {"existingClaim": "runs"},
    "training": {"batch_size": 16},
}


@pytest.fixture(scope="module")
def table():
    return tables.build("embedded-none")


@pytest.mark.parametrize("placement", ["gpu", "stream", "disk", "cpu", "balanced"])
def test_a_cell_has_the_memory_of_the_plan(table, placement):
    resolved = values.resolve(VALUES, {"pools": {"main": {"processesPerNode": 4, "placement": placement}}})
    (job,) = jobs(resolved)
    expected = sizes(question(resolved, job))
    row = table["rows"][f"half/adamw-no/64x64/4/float32/{placement}"].split()
    verdict, _, number = row[table["slots"]["16"]].split(",")
    assert table["verdicts"][int(verdict)] == tables.WITHIN
    assert table["sizes"][int(number)] == f"{expected.memory} {expected.shm}"


def test_auto_is_the_placement_that_the_planner_takes(table):
    resolved = values.resolve(VALUES, {"pools": {"main": {"processesPerNode": 4}}})
    (job,) = jobs(resolved)
    column = table["auto"]["half/adamw-no/64x64/4/float32"].split()
    letter = table["autos"][int(column[table["slots"]["16"]])]
    assert letter == tables.LETTERS[sizes(question(resolved, job)).placement.value]
