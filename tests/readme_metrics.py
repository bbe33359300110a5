"""The README's table of metrics, from the code: `python -m tests.readme_metrics --write` renews it."""

from __future__ import annotations

import sys
from pathlib import Path

from wandistill.metrics.names import METRICS, Scope

README = Path(__file__).resolve().parents[1] / "README.md"
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
    return BEGIN + "\n".join(lines) + "\n" + END


def renewed(readme: str) -> str:
    """The README with a new table."""
    head, rest = readme.split(BEGIN)
    return head + table() + rest.split(END)[1]


if __name__ == "__main__":
    text = renewed(README.read_text(encoding="utf-8"))
    if "--write" in sys.argv:
        README.write_text(text, encoding="utf-8")
    elif "--check" in sys.argv:
        if README.read_text(encoding="utf-8") != text:
            sys.exit("out of date: README.md; run make generate and commit what it changes.")
    else:
        print(table())
