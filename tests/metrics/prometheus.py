"""Questions to a running Prometheus, and which ones the dashboards and rules ask."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from wandistill.metrics.dashboards.__main__ import DASHBOARDS

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "helm" / "wandistill" / "rules" / "alerts.yaml"
# Panels that ask for exporters of others, or for a kernel with cgroup version 2.
OPTIONAL = {
    "GPU utilisation",
    "GPU memory used, by DCGM",
    "Pods by node, from kube-state-metrics",
    "Waiting for memory",
}
_SERIES = re.compile(r"wandistill[\w:]*_[\w:]+(?:\{[^}]*\})?")


@dataclass(frozen=True)
class Prometheus:
    """A server by its address."""

    url: str

    def query(self, expr: str, at: float | None = None) -> list[dict[str, Any]]:
        """The samples of an instant query; nothing while the server is not up.

        Args:
            at: seconds since the epoch; None: now.
        """
        found = self._ask("query", query=expr, **({} if at is None else {"time": at}))
        return found["result"] if found else []

    def query_range(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """The series of a query between two times."""
        found = self._ask("query_range", query=expr, start=start, end=end, step=step)
        return found["result"] if found else []

    def wait(self, expr: str, seconds: float = 90) -> list[dict[str, Any]]:
        """The samples, once there are any.

        Raises:
            TimeoutError: there were none.
        """
        end = time.monotonic() + seconds
        while not (found := self.query(expr)):
            if time.monotonic() > end:
                raise TimeoutError(f"no data within {seconds:.0f} s: {expr}")
            time.sleep(0.5)
        return found

    def _ask(self, what: str, **fields: Any) -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(
                f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(fields)}", timeout=60
            ) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            if error.code in (404, 502, 503):  # not up yet, or behind a proxy that does not find it yet
                return None
            raise AssertionError(f"{fields}: {error.read().decode()}") from error
        except OSError:
            return None


def panel_queries(namespace: str = ".*", run: str = ".*") -> Iterator[tuple[str, str]]:
    """Title and query of every panel of every dashboard, with the variables replaced."""
    for make in DASHBOARDS.values():
        for panel in make()["panels"]:
            for target in panel.get("targets", ()):
                yield panel["title"], with_variables(target["expr"], namespace, run)


def with_variables(expr: str, namespace: str, run: str) -> str:
    """A panel's query as Grafana asks it."""
    for variable, value in (("namespace", namespace), ("run", run), ("pool", ".*")):
        expr = expr.replace(f"${variable}", value)
    return expr


def rules() -> list[dict[str, Any]]:
    """The rules that the chart ships."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def series_of(expr: str) -> list[str]:
    """The selectors of the project's own series in a query."""
    return _SERIES.findall(expr)
