"""`wandistill status`: how jobs are, and why one does not run."""

from __future__ import annotations

import argparse
import json

from wandistill.kube.client import Client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which job."""
    parser.add_argument("job", nargs="?", help="name of the job (default: all, without their progress)")
    parser.add_argument("-n", "--namespace", help="namespace (default: that of the kubeconfig)")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each job")


def run(args: argparse.Namespace) -> int:
    """Prints the status.

    Raises:
        ClusterError: there is no such job, or the API server refused.
    """
    client = Client(namespace=args.namespace)
    found = [client.status(args.job)] if args.job else client.statuses()
    for status in found:
        print(json.dumps(status.to_json()) if args.json else status.text())
    if not found:
        print(f"no job of wandistill in namespace {client.cluster.namespace}")
    return 0
