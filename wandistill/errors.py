"""The errors that wandistill raises for people to read, and the exit codes, once.

Every message names the value, the rule it broke and what to change. `wandistill.cli` prints the message as one
paragraph, without a traceback, and ends with the error's exit code. 128 and above are safe to retry, below are not:
under restartPolicy ExitCode a PyTorchJob fails whole as soon as one replica ends with 1 to 127.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a wandistill process ends."""

    DONE = 0
    OUT_OF_MEMORY = 1
    BAD_CONFIG = 2
    TRAINING_FAILED = 3
    UNEXPECTED = 70
    INTERRUPTED = 130
    PEER_LOST = 138
    TERMINATED = 143


class WandistillError(Exception):
    """Base of the errors that carry an exit code and a sentence for the user."""

    exit_code = ExitCode.UNEXPECTED


class ConfigError(WandistillError):
    """A value, a combination of values or an input that breaks a rule; found before training starts."""

    exit_code = ExitCode.BAD_CONFIG


class DoesNotFit(ConfigError):
    """The run cannot fit the memory or disk that it was given."""


class OutOfMemory(WandistillError):
    """Memory ran out while the run was under way."""

    exit_code = ExitCode.OUT_OF_MEMORY


class TrainingFailed(WandistillError):
    """Training had started and cannot go on: a non-finite value, bad data, a disk that is full."""

    exit_code = ExitCode.TRAINING_FAILED


class PeerLost(WandistillError):
    """Another rank, or the network to it, is gone.

    Args:
        rank: the lost one, if it is known.
    """

    exit_code = ExitCode.PEER_LOST

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class Interrupted(WandistillError):
    """Ctrl-C: the state is saved."""

    exit_code = ExitCode.INTERRUPTED


class Terminated(WandistillError):
    """SIGTERM: the state is saved."""

    exit_code = ExitCode.TERMINATED
