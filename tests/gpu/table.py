"""tests/gpu/measured.yaml: what was measured on GPUs, a section for each program that measures."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

MEASURED = Path(__file__).with_name("measured.yaml")


def read(section: str, file: Path = MEASURED) -> list[dict[str, Any]]:
    """The rows of a section; none where there is no file yet."""
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else None
    return list((content or {}).get(section, []))


def write(section: str, rows: list[dict[str, Any]], file: Path = MEASURED) -> None:
    """Replaces the rows of a section."""
    content = (yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else None) or {}
    # Values of its own in each row: YAML would write aliases.
    content[section] = [json.loads(json.dumps(row)) for row in rows]
    file.write_text(yaml.safe_dump(content, sort_keys=False, width=120), encoding="utf-8")


def machine(commit: str | None = None) -> dict[str, Any]:
    """What the rows were measured on: GPUs, driver, versions, commit.

    Args:
        commit: of the code, where it is not in a git repository.
    """
    import torch

    from wandistill.train.record import versions

    command = ["git", "describe", "--always", "--dirty"]
    found: dict[str, Any] = {"commit": commit or _output(command), "versions": versions()}
    if torch.cuda.is_available():
        import pynvml

        pynvml.nvmlInit()
        found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
        found["versions"]["cuda"] = torch.version.cuda
    return found


def _output(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}: {result.stderr.strip()}. Outside a git repository give --commit.")
    return result.stdout.strip()
