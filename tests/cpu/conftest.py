"""Fixtures that several test files share."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# With --import-mode=importlib pytest adds nothing to the path; `tests` holds helpers such as tiny_wan.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_wan import LAYOUTS, build_tiny_wan


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_wan(kind)`: the folder of a tiny random teacher of a layout in `tiny_wan.LAYOUTS`; read only."""
    folders: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = build_tiny_wan(LAYOUTS[kind], tmp_path_factory.mktemp("wan") / kind)
        return folders[kind]

    return folder


@pytest.fixture
def tiny_wan_copy(tiny_wan: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """`tiny_wan_copy(kind)`: a copy of `tiny_wan(kind)` that the test may damage."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(tiny_wan(kind), tmp_path / kind))

    return copy
