"""The command line: finds the sub-command, imports only its module, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NoReturn

from wandistill import __version__
from wandistill.errors import ExitCode, WandistillError
from wandistill.launch import records


@dataclass(frozen=True)
class Command:
    """A sub-command: its module has `add_arguments(parser)` and `run(args) -> int`."""

    module: str
    help: str
    needs_torch: bool = True


COMMANDS = {
    "train": Command("wandistill.train.command", "distil a teacher into a student"),
    "prepare": Command("wandistill.data.command", "fill the caches of embeddings and latents, without training"),
    "evaluate": Command("wandistill.evaluate.command", "compare a run's student with its teacher"),
    "sample": Command("wandistill.models.sample_command", "draw pictures with a student or a teacher"),
    "export": Command("wandistill.models.export_command", "write a student from a checkpoint"),
    "verify": Command("wandistill.models.verify", "compare a teacher's forward with diffusers' own"),
    "launch": Command(
        "wandistill.launch.command", "run the ranks of a node with a launcher that watches over them", needs_torch=False
    ),
    "exporter": Command(
        "wandistill.metrics.exporter.command", "count a cluster's failures and out-of-memory kills", needs_torch=False
    ),
    "plan": Command("wandistill.planner.command", "say which placements fit, before anything loads", needs_torch=False),
    "render": Command("wandistill.kube.render_command", "print the Kubernetes objects of a values file", False),
    "values": Command("wandistill.kube.values_command", "compute sizes that the chart's tables do not have", False),
    "submit": Command("wandistill.kube.submit_command", "make the objects of a values file in a cluster", False),
    "status": Command("wandistill.kube.status_command", "say how jobs are, and why one does not run", False),
    "logs": Command("wandistill.kube.logs_command", "follow the logs of all pods of a job", False),
    "delete": Command("wandistill.kube.delete_command", "end a job and remove it", False),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns its exit code."""
    # Before torch starts its threads: several ranks on few cores otherwise spin against each other at every barrier.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="wandistill", description="Distil a Wan 2.x text-to-video teacher into a small text-to-image student."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, allow_abbrev=False)
        # The named command's module alone is imported: torch takes seconds.
        if name in arguments[:1]:
            _module(name, command).add_arguments(sub)
    return run_command(parser, arguments)


def run_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Parses `arguments` and runs their command; an error that is meant for the user is printed as one paragraph."""
    args = parser.parse_args(arguments)
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(level=logging.INFO if rank == "0" else logging.WARNING, format="%(message)s", stream=sys.stderr)
    # Libraries report every request and file; only their warnings are of interest here.
    for name in ("httpx", "huggingface_hub", "accelerate", "torchao"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # What these two warn of while importing torchao is for its authors.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    code, message = _outcome(args)
    records.leave(code, message)
    return int(code)


def _outcome(args: argparse.Namespace) -> tuple[int, str]:
    """The command's exit code, and what was told about it."""
    try:
        return int(_module(args.command, COMMANDS[args.command]).run(args)), ""
    except WandistillError as error:
        print(f"wandistill {args.command}: {error}", file=sys.stderr)
        return error.exit_code, str(error)
    except ModuleNotFoundError as error:
        _exit_for_missing(args.command, COMMANDS[args.command], error)
    except KeyboardInterrupt:
        print(f"wandistill {args.command}: stopped by Ctrl-C before there was anything to save.", file=sys.stderr)
        return ExitCode.INTERRUPTED, "stopped by Ctrl-C"
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE, ""
    except Exception as error:
        # Python's own exit code for this, 1, means out of memory here.
        traceback.print_exc()
        return ExitCode.UNEXPECTED, f"{type(error).__name__}: {error}"


def _module(name: str, command: Command) -> ModuleType:
    try:
        return importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        _exit_for_missing(name, command, error)


def _exit_for_missing(name: str, command: Command, error: ModuleNotFoundError) -> NoReturn:
    """Ends with what to install, if `error` is about a package that the base install leaves out."""
    if not command.needs_torch or (error.name or "").split(".")[0] == "wandistill":
        raise error
    print(
        f"wandistill {name}: needs the package {error.name}, which the base install leaves out: "
        "pip install 'wandistill[train]'.",
        file=sys.stderr,
    )
    sys.exit(int(ExitCode.BAD_CONFIG))
