"""The ranks of a run: who they are, and the few things that they say to each other outside the gradients."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from wandistill.config import TrainConfig
from wandistill.errors import ConfigError

# Loading a 14 B teacher, or a slow rank's export, may keep the others waiting this long.
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """This process among the ranks of the run."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.size > 1:
            dist.barrier()

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank; it must pickle."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, on every rank; it must pickle."""
        if self.size == 1:
            return [value]
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value)
        return boxes

    def any(self, flag: bool) -> bool:
        """Whether `flag` holds on any rank."""
        return any(self.gather(flag))

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` summed over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor


def start(config: TrainConfig) -> World:
    """Joins the ranks that torchrun started, or makes a world of one.

    Raises:
        ConfigError: --distributed without torchrun, a device that is not there, or more ranks on a node than GPUs.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
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
    rank = dist.get_rank() if launched else 0
    return World(rank, ranks if launched else 1, local_rank, local_size, device)


def choose_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    """The device of one rank."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu, or a machine with a GPU.")
    if local_size > torch.cuda.device_count():
        raise ConfigError(
            f"torchrun started {local_size} ranks on this node, which has {torch.cuda.device_count()} GPUs: "
            "give --nproc_per_node at most the number of GPUs, or --device cpu."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def stop() -> None:
    """Leaves the ranks' group."""
    if dist.is_initialized():
        dist.destroy_process_group()
