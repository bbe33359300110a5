"""Dashboards and alerts ask for what the table has, and everything that it has is asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.metrics.replay import recorded
from wandistill.metrics.dashboards.__main__ import DASHBOARDS, write
from wandistill.metrics.names import METRICS, Scope, series_names

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "wandistill"
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Names that queries use beside wandistill's own.
OTHERS = {"ALERTS", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "kube_pod_info"}


def rules() -> list[dict[str, object]]:
    content = yaml.safe_load((CHART / "rules" / "alerts.yaml").read_text(encoding="utf-8"))
    return [rule for group in content["groups"] for rule in group["rules"]]


def panels() -> list[tuple[str, dict[str, object]]]:
    return [(name, panel) for name, make in DASHBOARDS.items() for panel in make()["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    asked = [target["expr"] for _, panel in panels() for target in panel["targets"]]  # type: ignore[attr-defined]
    return asked + [str(rule["expr"]) for rule in rules()]


def names_in(query: str) -> set[str]:
    return set(re.findall(r"(?<![\w:])wandistill_\w+", query))


def test_every_series_that_is_asked_for_is_in_the_table():
    for query in queries():
        assert names_in(query) <= series_names(), query


def test_every_metric_of_the_table_is_asked_for():
    asked = {name for query in queries() for name in names_in(query)}
    assert [name for name, metric in METRICS.items() if not asked & set(metric.series)] == []


def test_a_recording_of_gpus_has_every_metric_of_gpus():
    records = recorded(ROOT / "tests" / "metrics" / "recorded")
    told = {name for name, metric in METRICS.items() if metric.scope is Scope.RANK and "_gpu_" in name}
    assert records and all(told <= set(record["samples"]) for record in records)


def test_every_label_value_that_is_asked_for_is_one_that_the_table_has():
    for query in queries():
        for name, selector in re.findall(r"(wandistill_\w+)\{([^}]*)\}", query):
            (metric,) = [metric for metric in METRICS.values() if name in metric.series]
            for label, operator, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', selector):
                assert label in {*metric.label_names, "namespace", "le"}, (name, label)
                allowed = metric.labels.get(label)
                if allowed and not value.startswith("$"):
                    assert set(value.split("|") if operator == "=~" else [value]) <= set(allowed), (name, label, value)


def test_every_panel_has_a_unit_a_description_and_a_place_of_its_own():
    for name, panel in panels():
        where = f"{name}: {panel['title']}"
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"], where  # type: ignore[index]
    for make in DASHBOARDS.values():
        taken: set[tuple[int, int]] = set()
        for panel in make()["panels"]:
            box = panel["gridPos"]
            cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
            assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
            taken |= cells


def test_the_chart_s_dashboards_are_those_of_the_code(tmp_path):
    write(tmp_path)
    for path in tmp_path.iterdir():
        assert (CHART / "dashboards" / path.name).read_text() == path.read_text(), "run `make generate`"
        variables = [variable["name"] for variable in json.loads(path.read_text())["templating"]["list"]]
        assert variables == ["datasource", "namespace", "run", "pool"]


@pytest.mark.parametrize("rule", [rule for rule in rules() if "alert" in rule], ids=lambda rule: rule["alert"])
def test_every_alert_has_a_severity_words_a_test_and_a_paragraph(rule):
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert rule["annotations"]["summary"] and rule["annotations"]["description"]
    assert f"alertname: {rule['alert']}" in (ROOT / "tests" / "metrics" / "alerts_test.yaml").read_text()
    assert f"**{rule['alert']}**" in README
