"""Memory of each rank's GPU that the other ranks of its node read, without the owner taking part."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from wandistill.models.held import hold
from wandistill.teacher.transport import Transport

if TYPE_CHECKING:
    from wandistill.train.distributed import World


class PeerMemory(NamedTuple):
    """One buffer on every member of a group, uint8, all of one size."""

    own: Tensor
    members: list[Tensor] | None  # each member's buffer as this rank reads it; None: they cannot be read


def peer_memory(size: int, world: World, transport: Transport) -> PeerMemory:
    """`size` bytes on each member, readable by all where every GPU reaches every other.

    All ranks of the job call this together.
    """
    device = world.device
    assert transport.group is not None
    reachable = device.type == "cuda" and all(
        torch.cuda.can_device_access_peer(device, index) for index in range(world.local_size) if index != device.index
    )
    if world.any(not reachable):
        own = torch.empty(size, dtype=torch.uint8, device=device)
        # What peers can read, below, is not torch's allocator's, which the metrics' terms add up to.
        hold("teacher", [own])
        return PeerMemory(own, None)
    from torch.distributed import _symmetric_memory as symmetric

    # Reading needs no multicast, which some hosts offer and then fail to set up.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, transport.group)
    return PeerMemory(own, [handle.get_buffer(member, (size,), torch.uint8) for member in range(transport.size)])
