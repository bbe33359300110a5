"""Which node this is of how many, and what torchrun is told of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wandistill.errors import ConfigError

_PORT = 29500

# What an operator sets for a node, torchrun sets for each rank under the same names, and reads PET_* as flags.
OPERATORS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def is_rank() -> bool:
    """Whether torchrun started this process, or another program that sets the same variables."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(frozen=True)
class Node:
    """One torchrun agent of a job."""

    ranks: int
    nodes: int = 1
    number: int = 0
    master: str = ""
    port: int = _PORT

    def torchrun(self) -> list[str]:
        """The flags of torchrun."""
        each = [f"--nproc_per_node={self.ranks}"]
        if self.nodes == 1:
            return ["--standalone", *each]
        place = [f"--nnodes={self.nodes}", f"--node_rank={self.number}"]
        return [*place, *each, f"--master_addr={self.master}", f"--master_port={self.port}"]

    def flags(self) -> list[str]:
        """The flags of `wandistill launch`."""
        each = ["--nproc", str(self.ranks)]
        if self.nodes == 1:
            return each
        place = ["--nnodes", str(self.nodes), "--node_rank", str(self.number)]
        return [*each, *place, "--master_addr", self.master, "--master_port", str(self.port)]


def find_node(flags: Mapping[str, str | None], environment: Mapping[str, str], devices: Path = Path("/dev")) -> Node:
    """The node that the flags describe, else the environment as the PyTorchJob operator sets it, else this machine.

    Args:
        flags: nproc, nnodes, node_rank, master_addr, master_port as texts; None where they are left out.
        devices: where GPUs are counted if nothing says how many ranks there are.

    Raises:
        ConfigError: a number that is none or out of its range, or several nodes without a master.
    """

    def number(flag: str, *names: str) -> int | None:
        return whole_number(flags, environment, flag, *names)

    ranks = number("nproc", "WANDISTILL_NPROC", "PET_NPROC_PER_NODE") or len(list(devices.glob("nvidia[0-9]*"))) or 1
    nodes = number("nnodes", "PET_NNODES")
    if nodes is None:
        # The operator's WORLD_SIZE counts the ranks of all nodes.
        nodes = max((number("", "WORLD_SIZE") or ranks) // ranks, 1) if "MASTER_ADDR" in environment else 1
    place = number("node_rank", "PET_NODE_RANK", "RANK") or 0
    master = flags.get("master_addr") or environment.get("MASTER_ADDR", "")
    port = number("master_port", "MASTER_PORT") or _PORT
    if nodes > 1 and not master:
        raise ConfigError(f"--nnodes {nodes}: --master_addr is missing; give the address of node 0 to every node.")
    if place >= nodes:
        raise ConfigError(f"--node_rank {place}: must be below --nnodes, {nodes}.")
    return Node(ranks, nodes, place, master, port)


def whole_number(flags: Mapping[str, str | None], environment: Mapping[str, str], flag: str, *names: str) -> int | None:
    """What a flag says, else the first of some variables; None where all are silent.

    Raises:
        ConfigError: it is no whole number.
    """
    given = flags.get(flag)
    found = [(f"--{flag}", given)] if given else [(name, environment[name]) for name in names if name in environment]
    for name, text in found:
        if text == "auto":  # torchrun's word for as many as there are GPUs
            continue
        if not text.isdigit():
            raise ConfigError(f"{name} {text}: must be a whole number.")
        return int(text)
    return None
