"""`wandistill logs`: the logs of all pods of a job, each line with its pod's role in front."""

from __future__ import annotations

import argparse

from wandistill.kube.client import Client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which job."""
    parser.add_argument("job", help="name of the job")
    parser.add_argument("-n", "--namespace", help="namespace (default: that of the kubeconfig)")


def run(args: argparse.Namespace) -> int:
    """Prints lines until the pods end.

    Raises:
        ClusterError: there is no such job, or the API server refused.
    """
    for line in Client(namespace=args.namespace).logs(args.job):
        print(line, flush=True)
    return 0
