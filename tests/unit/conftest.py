"""Makes the helpers in `tests` importable; what several test files share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from wandistill.metrics.pod import PodState, serve

# With --import-mode=importlib pytest adds nothing to the path; `tests` holds helpers such as synthetic_run.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[tuple[PodState, Path, int]]:
    """A pod's state, the folder of its ranks' snapshots, and the port of its endpoint."""
    state = PodState("job-a", "pool-a", 1)
    folder = tmp_path / "snapshots"
    folder.mkdir()
    endpoint = serve(state, folder, 0)
    yield state, folder, endpoint.port
    endpoint.close()
