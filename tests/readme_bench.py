"""The README's table of what placements take, from tests/gpu/measured.yaml: `python -m tests.readme_bench --write`
renews it."""

from __future__ import annotations

from typing import Any

from tests.gpu import table as measured
from tests.readme_part import main, replaced

BEGIN, END = "<!-- placements measured -->\n", "<!-- end of placements measured -->\n"
SMALL, WIDE = ("832x480", 1), ("832x480", 8)
Row = dict[str, Any]


def table(rows: list[Row] | None = None) -> str:
    """The table as Markdown: a way to keep the teacher and a number of GPUs a line, in the order of measurement."""
    rows = measured.read("bench") if rows is None else rows
    found = {
        (row["ranks"], row["case"], (row["resolution"], row["batch"])): row
        for row in rows
        if "student_seconds" not in row
    }
    cpu = found.get((1, "cpu", SMALL))
    lines = [
        "| teacher | GPUs | on each GPU, GB | at most, GB | host, GB | samples a second | to cpu | to resident "
        "| with 8 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for ranks, case in sorted({key[:2]: None for key in found}, key=lambda key: key[0]):
        one, eight = found.get((ranks, case, SMALL)), found.get((ranks, case, WIDE))
        if one is None:
            continue
        cells = [
            case,
            str(ranks),
            _each(one["gpu_placed_bytes"]),
            _each(one["gpu_process_bytes"]),
            _giga(one["host_bytes"]),
            f"{_rate(one):.3g}",
            f"{_rate(one) / _rate(cpu):.3g}" if cpu else "",
            _share(one),
            _share(eight) if eight else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _each(sizes: list[int]) -> str:
    """GB of each rank, once where all have the same."""
    told = [_giga(size) for size in sizes]
    return told[0] if len(set(told)) == 1 else ", ".join(told)


def _giga(size: int) -> str:
    return f"{size / 1e9:.1f}"


def _rate(row: Row) -> float:
    """Samples a second of all ranks."""
    return float(row["ranks"] * row["batch"] / row["seconds"])


def _share(row: Row) -> str:
    ratio = row.get("ratio_to_resident")
    return "" if ratio is None else f"{ratio:.3f}"


def renewed(readme: str) -> str:
    """The README with a new table."""
    return replaced(readme, BEGIN, table(), END)


if __name__ == "__main__":
    main(renewed, table)
