"""`python -m wandistill.metrics.dashboards FOLDER` writes the dashboards as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from wandistill.metrics.dashboards.fleet import fleet
from wandistill.metrics.dashboards.memory import memory
from wandistill.metrics.dashboards.run import run_overview

DASHBOARDS = {"run": run_overview, "memory": memory, "fleet": fleet}


def write(folder: Path) -> None:
    """Writes each dashboard to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in DASHBOARDS.items():
        (folder / f"{name}.json").write_text(json.dumps(make(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
