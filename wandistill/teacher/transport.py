"""Tensors between the ranks of a placement, on a process group of its own.

NCCL and gloo are used alike: point to point in `batch_isend_irecv` alone, tensors of the ranks' device; small notices
among all members through gloo on the CPU, so that hosts agree without waiting for GPUs. Members are numbered within
the group, from 0, in the order of their ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from wandistill.errors import PeerLost
from wandistill.train.distributed import TIMEOUT
from wandistill.train.watch import peer_errors

if TYPE_CHECKING:
    from wandistill.train.distributed import World

# Exchanges whose tensors are kept while they are sent: the one that was just made, and the one before it, so that a
# sender may be one tensor ahead of the receiver.
_UNDER_WAY = 2


def job_members(world: World) -> list[int]:
    """All ranks."""
    return list(range(world.size))


def node_members(world: World) -> list[int]:
    """The ranks of this rank's node."""
    nodes = world.gather(world.node)
    return [rank for rank, node in enumerate(nodes) if node == nodes[world.rank]]


class Message(NamedTuple):
    """A tensor on its way."""

    tensor: Tensor  # to send, or to receive into; contiguous
    peer: int  # the member at the other end


class Transfer:
    """Messages under way; their tensors are kept for them."""

    def __init__(self, works: Sequence[dist.Work], sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._works, self._messages = works, [*sends, *receives]
        # NCCL gives one work for the whole batch, gloo one for each message.
        self._arriving = works[len(sends) :] if len(works) == len(self._messages) else works

    def arrived(self) -> None:
        """Waits for what is received: the host on a CPU, the current stream on a GPU."""
        _wait(self._arriving)

    def finish(self) -> None:
        """Waits for all messages likewise, and lets their tensors go."""
        _wait(self._works)
        self._messages = []


def _wait(works: Sequence[dist.Work]) -> None:
    with peer_errors():
        for work in works:
            # gloo would wait for ever for a message that has been waited for.
            if not work.is_completed():
                work.wait()


class Notices:
    """One notice of each member, under way."""

    def __init__(self, work: dist.Work | None, notices: list[Tensor]) -> None:
        self._work, self._notices = work, notices

    def wait(self) -> list[list[int]]:
        """The notices, in the members' order; waits on the host until every member has given one."""
        if self._work is not None:
            with peer_errors():
                self._work.wait()
            self._work = None
        return [notice.tolist() for notice in self._notices]


class Transport:
    """What the members of a placement say to each other. All ranks of the job must make it at the same point.

    Args:
        members: the ranks of the job that this rank's placement spans, itself among them.
    """

    def __init__(self, world: World, members: Sequence[int]) -> None:
        self.size = len(members)
        self.index = members.index(world.rank)
        self.members = members
        self.group: dist.ProcessGroup | None = None
        self._under_way: deque[Transfer] = deque()
        groups = {tuple(group) for group in world.gather(tuple(members))}
        for group in sorted(groups):  # groups are made by all ranks of the job, in one order
            if len(group) > 1:
                made = dist.new_group(list(group), timeout=TIMEOUT)
                if isinstance(made, dist.ProcessGroup):  # else this rank is none of them
                    self.group = made
        if self.group is not None and world.device.type == "cuda":
            # The first use of an NCCL group connects it, which all members must do together.
            dist.all_reduce(torch.zeros(1, device=world.device), group=self.group)

    def announce(self, notice: Sequence[int]) -> Notices:
        """Gives a notice and begins to gather the others'; as many numbers every time."""
        own = torch.tensor(notice, dtype=torch.int64)
        if self.group is None:
            return Notices(None, [own])
        notices = [torch.empty_like(own) for _ in range(self.size)]
        with peer_errors():
            return Notices(dist.all_gather(notices, own, group=self.group, async_op=True), notices)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Begins to send and receive, in the order that the peers give for the same messages.

        Waits for the exchange before the last one, as `Transfer.finish` does.
        """
        if not sends and not receives:
            return Transfer([], [], [])
        while len(self._under_way) >= _UNDER_WAY:
            self._under_way.popleft().finish()
        operations = [dist.P2POp(dist.isend, m.tensor, self.members[m.peer], self.group) for m in sends]
        operations += [dist.P2POp(dist.irecv, m.tensor, self.members[m.peer], self.group) for m in receives]
        with peer_errors():
            transfer = Transfer(dist.batch_isend_irecv(operations), sends, receives)
        self._under_way.append(transfer)
        return transfer

    def gather(self, parts: Tensor) -> None:
        """Fills each row of `parts` [members, n] with that member's own row: on the current stream of a GPU, on the
        host on a CPU. Members gather in the same order."""
        with peer_errors():
            dist.all_gather_into_tensor(parts.view(-1), parts[self.index], group=self.group)

    def finish(self) -> None:
        """Waits for what is under way; a peer may still need it when this rank has all that it asked for."""
        with suppress(PeerLost):  # then nobody needs it
            while self._under_way:
                self._under_way.popleft().finish()

    def abandon(self) -> None:
        """Drops what is under way, which a peer that is out of step will never receive."""
        self._under_way.clear()
