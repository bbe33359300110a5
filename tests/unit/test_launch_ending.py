"""The launcher's exit code, from what is known of the ranks' ends."""

from __future__ import annotations

import signal

import pytest

from wandistill.errors import ExitCode
from wandistill.launch.ending import Ending, Evidence, Shortage, ending_of
from wandistill.launch.records import ExitRecord, Failure


def evidence(exits: dict[int, int] | None = None, failures: dict[int, int] | None = None, **more: object) -> Evidence:
    """Ranks that ended by themselves with codes, and those that torchrun saw fail, the first one first."""
    told = {rank: ExitRecord(rank, code, f"rank {rank}'s reason") for rank, code in (exits or {}).items()}
    seen = {rank: Failure(code, 100.0 + place) for place, (rank, code) in enumerate((failures or {}).items())}
    return Evidence(1, told, seen, **more)  # type: ignore[arg-type]


def test_a_rank_that_the_kernel_killed_is_an_out_of_memory_and_named():
    ending = ending_of(evidence({0: 138, 1: 138}, {2: -9, 0: 138, 1: 138}, oom_kills=1))
    assert (ending.code, ending.rank, ending.shortage) == (ExitCode.OUT_OF_MEMORY, 2, Shortage.KERNEL)


def test_a_rank_that_was_killed_from_outside_is_lost_and_named():
    ending = ending_of(evidence({0: 138}, {2: -9, 0: 138}))
    assert (ending.code, ending.rank) == (ExitCode.PEER_LOST, 2)


def test_torchrun_may_be_the_one_that_the_kernel_kills():
    ending = ending_of(Evidence(-9, {}, {}, oom_kills=1))
    assert (ending.code, ending.shortage) == (ExitCode.OUT_OF_MEMORY, Shortage.KERNEL)


def test_a_kill_of_another_process_does_not_make_a_failed_run_an_out_of_memory():
    ending = ending_of(evidence({0: 3, 1: 3}, {0: 3, 1: 3}, oom_kills=1))
    assert ending.code is ExitCode.TRAINING_FAILED


def test_ranks_that_torchrun_killed_after_one_had_failed_follow_from_it():
    ending = ending_of(evidence({1: 70}, {1: 70, 0: -15, 2: -9}, oom_kills=0))
    assert (ending.code, ending.message) == (ExitCode.UNEXPECTED, "rank 1's reason")


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((138, 1), 1),
        ((138, 3), 3),
        ((143, 2), 2),
        ((143, 143), 143),
        ((130, 130), 130),
        ((143, 138), 143),
        ((138, 138), 138),
    ],
)
def test_the_cause_wins_over_what_follows_from_it(codes, expected):
    assert ending_of(evidence(dict(enumerate(codes)), dict(enumerate(codes)))).code == expected


def test_a_signal_that_hit_the_ranks_before_they_could_save_counts_as_the_stop_it_was():
    ending = ending_of(evidence({}, {0: -15, 1: -15}, signal=signal.SIGTERM))
    assert ending.code is ExitCode.TERMINATED


def test_ranks_that_were_stopped_at_the_limit_ran_out_of_memory():
    ending = ending_of(evidence({}, {0: -9, 1: -9}, stopped_at_limit=True))
    assert (ending.code, ending.shortage) == (ExitCode.OUT_OF_MEMORY, Shortage.STOPPED)


def test_nodes_that_never_met_are_tried_again_and_one_node_is_not():
    assert ending_of(evidence(nodes=2)).code is ExitCode.PEER_LOST
    assert ending_of(evidence(nodes=1)).code is ExitCode.UNEXPECTED


def test_a_crash_of_a_rank_that_is_done_is_none_unless_it_took_another_with_it():
    assert ending_of(evidence({0: 0, 1: 0}, {1: -6})).code is ExitCode.DONE
    assert ending_of(evidence({1: 0}, {1: -6, 0: -15})).code is ExitCode.UNEXPECTED


def test_all_done_is_0():
    assert ending_of(Evidence(0, {}, {})) == Ending(ExitCode.DONE, "done")
