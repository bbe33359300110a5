"""promtool on rules, their tests, every query of the dashboards, and what the endpoints serve: `make test-metrics`."""

from __future__ import annotations

import json
import subprocess

from tests.metrics.prometheus import ROOT, RULES, panel_queries
from tests.tools.build import tool
from wandistill.metrics.names import METRICS, Kind, Scope
from wandistill.metrics.pod import PodState, serve
from wandistill.metrics.snapshot import mine, write


def promtool(*arguments: object, text: str | None = None) -> str:
    """Runs promtool; anything but success fails the test with what it said."""
    command = [str(tool("promtool")), *map(str, arguments)]
    result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_the_rules_are_valid():
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)


def test_each_alert_is_raised_by_its_fault_and_by_no_other():
    assert "SUCCESS" in promtool("test", "rules", ROOT / "tests" / "metrics" / "alerts_test.yaml")


def test_every_query_of_every_panel_is_promql(tmp_path):
    queries = [query for _, query in panel_queries()]
    rules = [{"record": f"panel:query:n{index}", "expr": query} for index, query in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", "--lint=none", file)


def test_what_a_pod_serves_passes_the_check_of_metrics(tmp_path):
    from urllib.request import urlopen

    told = mine(0, 0, 0)
    for metric in METRICS.values():
        if metric.scope in (Scope.RANK, Scope.RUN):
            labels = {name: (values or ("x",))[0] for name, values in metric.labels.items()}
            value = {"counts": [1] * 16, "sum": 9.5} if metric.kind is Kind.HISTOGRAM else 1
            told.samples[metric.name] = [(labels, value)]
    assert write(tmp_path, told)
    endpoint = serve(PodState("run", "pool", 0, exit_code=0), tmp_path, 0)
    try:
        text = urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=20).read().decode()
    finally:
        endpoint.close()
    assert all(name in text for name, metric in METRICS.items() if metric.scope in (Scope.RANK, Scope.RUN))
    promtool("check", "metrics", text=text)
