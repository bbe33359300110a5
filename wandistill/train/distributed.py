"""The ranks of a run: who they are, and the few things that they say to each other outside the gradients."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from wandistill.config import TrainConfig
from wandistill.errors import ConfigError, Interrupted, PeerLost, Terminated, TrainingFailed
from wandistill.launch.driver import check_driver
from wandistill.launch.node import is_rank
from wandistill.train.alarm import Alarm
from wandistill.train.watch import PeerWatch, peer_lost

# What all ranks raise in the same step, however long each takes to leave. A ConfigError may be one rank's alone; where
# all have it they leave together, well within the watch's time.
SHARED = (Interrupted, Terminated, TrainingFailed)

# Loading a 14 B teacher, or a slow rank's export, may keep the others waiting this long.
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """This process among the ranks of the run, or of those that train."""

    rank: int  # -1: it is none of them
    size: int
    local_rank: int  # among all ranks of the node
    local_size: int
    device: torch.device
    node: int = 0  # a node is one torchrun agent; they may have unlike numbers of ranks
    group: dist.ProcessGroup | None = None  # None: all ranks of the job

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    @property
    def job_rank(self) -> int:
        """This process's rank among all ranks of the job."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def takes_part(self) -> bool:
        """Whether this process is one of these ranks."""
        return self.rank >= 0

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.size > 1:
            dist.barrier(self.group)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank; it must pickle."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, on every rank; it must pickle."""
        if self.size == 1:
            return [value]
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value, group=self.group)
        return boxes

    def any(self, flag: bool) -> bool:
        """Whether `flag` holds on any rank."""
        return any(self.gather(flag))

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` summed over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def broadcast_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's `tensor`, in place on every rank."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def without(self, rank: int) -> World:
        """The ranks but for one, in the same order; all of them call this together, that one too."""
        others = [other for other in range(self.size) if other != rank]
        group = dist.new_group(others, timeout=TIMEOUT)
        if self.rank == rank:
            return replace(self, rank=-1, size=len(others))
        assert isinstance(group, dist.ProcessGroup)
        return replace(self, rank=others.index(self.rank), size=len(others), group=group)

    def alone(self) -> World:
        """This rank as a world of its own."""
        return World(0, 1, 0, 1, self.device, self.node)


_watch: PeerWatch | None = None


@contextmanager
def joined(config: TrainConfig) -> Iterator[tuple[World, Alarm]]:
    """The ranks that torchrun started, or a world of one, until the body ends; and who tells them of a lack of memory.

    Raises:
        ConfigError: see `start`.
        OutOfMemory: memory ran out, and this is the only rank; of several ranks all end here, after one report.
        PeerLost: a rank left in the middle, which torch.distributed reports in many ways.
    """
    world = start(config)
    alarm = Alarm(world, config)
    if _watch is not None:
        _watch.on_lost = alarm.lost
    orderly = False
    try:
        yield world, alarm
        orderly = True
    except SHARED:
        orderly = True
        raise
    except PeerLost as error:
        alarm.lost(error.rank)
        raise
    except Exception as error:
        alarm.handle(error)
        lost = peer_lost(error)
        if lost is None:
            raise
        alarm.lost(lost.rank)
        raise lost from error
    finally:
        alarm.close()
        stop(orderly=orderly)


def start(config: TrainConfig) -> World:
    """Joins the ranks that torchrun started, or makes a world of one.

    Raises:
        ConfigError: --distributed without torchrun, a device that is not there, or more ranks on a node than GPUs.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    launched = is_rank()
    if config.distributed and not launched:
        raise ConfigError(
            "--distributed: no torchrun started this process; start it with "
            "'torchrun --nproc_per_node=N -m wandistill.train ...', or leave the flag out."
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = choose_device(config.device, local_rank, local_size)
    if launched and not dist.is_initialized():
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT, device_id=device if on_gpu else None
        )
        global _watch
        _watch = PeerWatch()
    rank = dist.get_rank() if launched else 0
    node = int(os.environ.get("GROUP_RANK", "0"))
    return World(rank, ranks if launched else 1, local_rank, local_size, device, node)


def choose_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    """The device of one rank."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        check_driver()
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu, or a machine with a GPU.")
    if local_size > torch.cuda.device_count():
        raise ConfigError(
            f"torchrun started {local_size} ranks on this node, which has {torch.cuda.device_count()} GPUs: "
            "give --nproc_per_node at most the number of GPUs, or --device cpu."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def stop(*, orderly: bool = True) -> None:
    """Leaves the ranks' group.

    Args:
        orderly: all ranks leave here; else the others learn that they lost this one.
    """
    global _watch
    if _watch is not None:
        _watch.close(orderly=orderly)
        _watch = None
    # NCCL may wait here for the peers that wait for this rank; they learn of it when the process ends.
    if dist.is_initialized() and (orderly or dist.get_backend() == "gloo"):
        dist.destroy_process_group()
