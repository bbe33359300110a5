"""`wandistill delete`: end a job and remove it; claims and what is on them stay."""

from __future__ import annotations

import argparse

from wandistill.kube.client import Client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which job."""
    parser.add_argument("job", help="name of the job")
    parser.add_argument("-n", "--namespace", help="namespace (default: that of the kubeconfig)")


def run(args: argparse.Namespace) -> int:
    """Deletes the job.

    Raises:
        ClusterError: there is no such job, or the API server refused.
    """
    Client(namespace=args.namespace).delete(args.job)
    print(f"{args.job} deleted; its output stays on the claim")
    return 0
