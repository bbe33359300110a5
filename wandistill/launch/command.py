"""`wandistill launch`: the ranks of a node with a launcher that watches over them; a pod's entry point."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from wandistill import config
from wandistill.config import TrainConfig
from wandistill.launch import prepared
from wandistill.launch.driver import check_driver
from wandistill.launch.launcher import MOST_IDLE, Launcher
from wandistill.launch.node import find_node, whole_number

RESTARTS = "WANDISTILL_RESTARTS"
MOST = MOST_IDLE - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which node this is, then `--` and the flags of `wandistill train`."""
    for name, text in (
        ("nproc", "ranks on this node (default: WANDISTILL_NPROC, else as many as there are GPUs)"),
        ("nnodes", "nodes of the job (default: PET_NNODES, else 1)"),
        ("node_rank", "number of this node, from 0 (default: PET_NODE_RANK, else RANK)"),
        ("master_addr", "address of node 0 (default: MASTER_ADDR)"),
        ("master_port", "port of node 0 (default: MASTER_PORT)"),
        ("restarts", f"tries in a row, after the first, without a new checkpoint (default: {RESTARTS}, else {MOST})"),
    ):
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, help=text)
    parser.add_argument("train", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="flags of wandistill train")


def run(args: argparse.Namespace) -> int:
    """Runs the job on this node; returns the exit code that tells its cause.

    Raises:
        ConfigError: flags of the node or of `wandistill train` that cannot be, a GPU driver that is too old, or caches
            that were to be prepared and are not.
    """
    flags = args.train[1:] if args.train[:1] == ["--"] else args.train
    node = find_node(vars(args), os.environ)
    settings = parse_train(flags)
    if settings.device != "cpu":
        check_driver()
    patience = whole_number({}, os.environ, "", prepared.WAIT)
    if patience:
        prepared.wait(settings, patience)
    restarts = whole_number(vars(args), os.environ, "restarts", RESTARTS)
    return Launcher(node, settings, flags, most_idle=(MOST if restarts is None else restarts) + 1).run()


def parse_train(flags: Sequence[str]) -> TrainConfig:
    """The settings that the flags of `wandistill train` give, so that a wrong one is told before anything starts."""
    parser = argparse.ArgumentParser(prog="wandistill launch --", allow_abbrev=False)
    config.add_arguments(parser)
    return config.from_arguments(parser.parse_args(flags))
