"""How often a run may start anew without a new checkpoint is the user's: the chart's job.restarts ends here."""

import time

import pytest
from launching import launch

from wandistill.launch import state


def lost(tmp_path, tries):
    """Leaves the state of a run whose last tries all lost a peer."""
    ended = state.Try(tries, time.time(), 0, idle=tries).end(138, "rank 9 is gone")
    state.StateFile(tmp_path / "run", 0).write(ended)


@pytest.mark.parametrize(("restarts", "tries", "code"), [("0", 1, 3), ("7", 5, 0), ("7", 8, 3)])
def test_tries_end_after_as_many_restarts_as_the_environment_says(tmp_path, monkeypatch, restarts, tries, code):
    monkeypatch.setenv("WANDISTILL_RESTARTS", restarts)
    lost(tmp_path, tries)
    found, printed = launch(tmp_path, "leave(0)", ranks=1)
    assert found == code, printed
    assert (f"{tries} tries in a row ended without a new checkpoint" in printed) == (code == 3)
