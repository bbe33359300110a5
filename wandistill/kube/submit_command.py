"""`wandistill submit`: make the objects of a values file in a cluster."""

from __future__ import annotations

import argparse
import sys

from wandistill.errors import ExitCode
from wandistill.kube.client import Client
from wandistill.kube.job import render
from wandistill.kube.render_command import add_values, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The values, as for helm, and where to."""
    add_values(parser)
    parser.add_argument("-n", "--namespace", help="namespace (default: that of the kubeconfig)")
    parser.add_argument("--wait", action="store_true", help="wait for the end of the jobs; 3 if one failed")


def run(args: argparse.Namespace) -> int:
    """Submits; prints the jobs' names.

    Raises:
        WandistillError: values that break a rule, or a cluster that refused.
    """
    client = Client(namespace=args.namespace)
    values = read(args)
    jobs = [made for made in render(values, args.name) if made["kind"] == "PyTorchJob"]
    for sentence in client.unshared(jobs):
        print(f"note: {sentence}", file=sys.stderr)
    names = client.submit(values, args.name)
    for name in names:
        print(name, flush=True)
    failed = False
    for name in names if args.wait else ():
        status = client.wait(name)
        print(status.text(), flush=True)
        failed |= status.state != "Succeeded"
    return int(ExitCode.TRAINING_FAILED if failed else ExitCode.DONE)
