"""The README's table of metrics, from the code: `python -m tests.readme_metrics --write` renews it."""

from __future__ import annotations

from tests.readme_part import main, replaced
from wandistill.metrics.names import METRICS, Scope

BEGIN, END = "<!-- metrics -->\n", "<!-- end of metrics -->\n"
SCOPES = {
    Scope.RANK: "rank",
    Scope.POD: "pod",
    Scope.RUN: "run",
    Scope.CLUSTER: "exporter, a run",
    Scope.EXPORTER: "exporter",
}


def table() -> str:
    """The table as Markdown: a metric a line."""
    lines = ["| metric | kind | of | labels of its own | what |", "|---|---|---|---|---|"]
    for name, metric in METRICS.items():
        labels = ", ".join(
            f"{label}: {' '.join(values)}" if values else label for label, values in metric.labels.items()
        )
        lines.append(f"| `{name}` | {metric.kind.value} | {SCOPES[metric.scope]} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


def renewed(readme: str) -> str:
    """The README with a new table."""
    return replaced(readme, BEGIN, table(), END)


if __name__ == "__main__":
    main(renewed, table)
