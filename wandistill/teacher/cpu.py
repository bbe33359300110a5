"""Placement `cpu`: one host copy per node, each rank computes on its share of the cores, where the weights lie."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from wandistill.teacher.assembly import Assembly
from wandistill.teacher.base import Teacher
from wandistill.teacher.feeds import Mapped

if TYPE_CHECKING:
    from wandistill.teacher import Setting


def build(setting: Setting) -> Teacher:
    """Computes on the CPU, whatever the student's device is."""
    parts = Assembly(setting, torch.device("cpu"), direct=False)
    copy = parts.host_copy(parts.layout.records)
    parts.reader.close()
    share = ExitStack()
    share.enter_context(share_of_cores(setting.world.local_size))
    return parts.engine(Mapped(copy), Mapped(copy), closing=[copy.close, share.close], copy=copy)


@contextmanager
def share_of_cores(ranks: int) -> Iterator[None]:
    """Computes with this rank's share of the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(core_share(before, ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def core_share(threads: int, ranks: int) -> int:
    """Threads of one of `ranks` ranks on this machine, given what torch would take.

    torchrun sets OMP_NUM_THREADS to 1 where the user did not set it, which leaves all but `ranks` cores idle; another
    number is the user's, and stays.
    """
    if ranks == 1 or os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return threads
    return max(len(os.sched_getaffinity(0)) // ranks, 1)
