"""How `stream` brings blocks to a node's ranks: each copies whole ones from the host, or they share the fetch."""

from __future__ import annotations

from wandistill.planner.rates import Rates
from wandistill.planner.request import PlanRequest

OWN, SPLIT = "own", "split"


def no_split(request: PlanRequest) -> str:
    """Why the ranks of a node cannot share the fetch; empty: they can."""
    if request.machines.ranks == 1:
        return "there is one rank on a node"
    if request.on_gpu and request.share_dir:
        return "a host copy in --share_dir cannot be pinned for the GPUs"
    return ""


def fetch_seconds(request: PlanRequest, rates: Rates, moved: int, fetch: str) -> float:
    """Seconds until `moved` bytes are on each rank of a node, all ranks at once."""
    ranks, gpu = request.machines.ranks, request.machines.gpu
    if fetch == OWN:
        return moved / rates.host_link
    host, peers = moved / ranks / rates.host_link, moved * (ranks - 1) / ranks / rates.peer_link
    # NVLink is a port of its own; over PCIe both come in through one.
    return max(host, peers) if gpu is not None and gpu.peer_kind == "nvlink" else host + peers


def may_split(request: PlanRequest) -> bool:
    """Whether `--stream_fetch` may come to a shared fetch, however much the teacher computes."""
    if request.stream_fetch == OWN or no_split(request):
        return False
    gpu = request.machines.gpu
    return request.stream_fetch == SPLIT or (gpu is not None and gpu.peer_kind != "host")


def choose_fetch(request: PlanRequest, rates: Rates, moved: int, compute: float) -> str:
    """What `--stream_fetch` comes to.

    Args:
        moved: bytes that each rank needs in a step.
        compute: seconds of the teacher's compute in a step.
    """
    if not may_split(request):
        return OWN
    own, split = (fetch_seconds(request, rates, moved, fetch) for fetch in (OWN, SPLIT))
    faster = own > compute and split < own
    return SPLIT if faster or request.stream_fetch == SPLIT else OWN
