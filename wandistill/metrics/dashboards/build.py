"""The parts of a Grafana dashboard: queries, panels, rows, variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Every query of a run's panel chooses by these.
RUN = 'namespace=~"$namespace", run=~"$run", pool=~"$pool"'
_WIDTH = 24


@dataclass(frozen=True)
class Query:
    """A PromQL query and the name of its series; `{{label}}` in the name is the label's value."""

    expr: str
    legend: str = ""
    instant: bool = False


@dataclass(frozen=True)
class Panel:
    """A panel; `steps` are its thresholds: (colour, from which value on; None: from below)."""

    title: str
    kind: str  # timeseries, stat, bargauge, table
    queries: Sequence[Query]
    unit: str
    description: str
    width: int = 8
    height: int = 8
    steps: Sequence[tuple[str, float | None]] = (("green", None),)
    least: float | None = None
    most: float | None = None
    stacked: bool = False
    columns: dict[str, str] = field(default_factory=dict)  # of a table: label to heading; others are hidden
    value: str = ""  # of a table: the heading of the value, which is hidden without one

    def to_json(self, number: int, x: int, y: int) -> Json:
        """As Grafana reads it."""
        defaults: Json = {
            "unit": self.unit,
            "thresholds": {
                "mode": "absolute",
                "steps": [{"color": color, "value": value} for color, value in self.steps],
            },
        }
        if self.least is not None:
            defaults["min"] = self.least
        if self.most is not None:
            defaults["max"] = self.most
        if self.kind == "timeseries":
            defaults["custom"] = {
                "fillOpacity": 30 if self.stacked else 0,
                "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
                "thresholdsStyle": {"mode": "line" if len(self.steps) > 1 else "off"},
            }
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": _SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": self._options(),
            "targets": [
                {
                    "refId": chr(ord("A") + index),
                    "datasource": _SOURCE,
                    "expr": query.expr,
                    "legendFormat": query.legend,
                    "instant": query.instant,
                    "range": not query.instant,
                    **({"format": "table"} if self.kind == "table" else {}),
                }
                for index, query in enumerate(self.queries)
            ],
            **({"transformations": self._table()} if self.kind == "table" else {}),
        }

    def _options(self) -> Json:
        last: Json = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        options: Json = {
            "timeseries": {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            },
            "stat": {"reduceOptions": last, "textMode": "value_and_name", "colorMode": "value"},
            "bargauge": {"reduceOptions": last, "orientation": "horizontal", "displayMode": "basic"},
            "table": {"showHeader": True},
        }
        found = options[self.kind]
        assert isinstance(found, dict)
        return found

    def _table(self) -> list[Json]:
        names = {**self.columns, **({"Value": self.value} if self.value else {})}
        order = {name: index for index, name in enumerate(names)}
        return [
            {"id": "merge", "options": {}},
            {"id": "filterFieldsByName", "options": {"include": {"names": list(names)}}},
            {"id": "organize", "options": {"indexByName": order, "renameByName": dict(names)}},
        ]


def dashboard(uid: str, title: str, description: str, rows: Sequence[tuple[str, Sequence[Panel]]]) -> Json:
    """A dashboard of rows of panels, each panel beside the one before as long as there is room."""
    panels: list[Json] = []
    y = 0
    for heading, content in rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": heading,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
            }
        )
        y, x, tallest = y + 1, 0, 0
        for panel in content:
            if x + panel.width > _WIDTH:
                y, x, tallest = y + tallest, 0, 0
            panels.append(panel.to_json(len(panels) + 1, x, y))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["wandistill"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                _variable("namespace", "Namespace", "wandistill_run_state"),
                _variable("run", "Job", 'wandistill_run_state{namespace=~"$namespace"}'),
                _variable("pool", "Pool", 'wandistill_run_state{namespace=~"$namespace", run=~"$run"}'),
            ]
        },
        "annotations": {"list": []},
        "links": [
            {"type": "dashboards", "tags": ["wandistill"], "asDropdown": True, "title": "wandistill", "keepTime": True}
        ],
        "panels": panels,
    }


def _variable(name: str, label: str, of: str) -> Json:
    query = f"label_values({of}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }
