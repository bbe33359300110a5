"""`wandistill exporter`: counts out-of-memory kills and failures of all runs of a namespace or a cluster."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from pathlib import Path

from wandistill.metrics.exporter.api import Cluster
from wandistill.metrics.exporter.exporter import Exporter
from wandistill.metrics.exporter.terminations import RUN_LABEL
from wandistill.metrics.pod import Endpoint

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where it looks and what it serves."""
    parser.add_argument(
        "--namespace", default="", help="namespace of the runs and of what it remembers; empty: its own"
    )
    parser.add_argument("--cluster_wide", "--cluster-wide", action="store_true", help="watch runs of all namespaces")
    parser.add_argument("--selector", default=RUN_LABEL, help="label selector of the runs' pods (default: %(default)s)")
    parser.add_argument(
        "--metrics_port", "--metrics-port", type=int, default=9401, help="port that is served (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C; returns 0."""
    namespace = args.namespace or _own_namespace()
    exporter = Exporter(
        Cluster(namespace, cluster_wide=args.cluster_wide, selector=args.selector),
        os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: exporter.stop())
    endpoint = Endpoint(exporter, args.metrics_port)
    try:
        exporter.run()
    finally:
        endpoint.close()
    return 0


def _own_namespace() -> str:
    try:
        return _SERVICE_ACCOUNT.read_text(encoding="utf-8").strip()
    except OSError:
        return "default"
