"""helm and kubeconform for the chart's tests, as `tests.tools.build` gives them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The repository itself, for `tests.generate_chart` and `tests.tools`.
sys.path.insert(0, str(ROOT))

from tests.tools.build import BuildError, tool  # noqa: E402


class Helm:
    """Runs helm on the chart."""

    def __init__(self, program: str) -> None:
        self.program = program

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """helm with these arguments, whatever its exit code."""
        # A helm that `go build` made, without its release's flags, takes the cluster for Kubernetes 1.20.
        command = [self.program, *arguments, "--kube-version", "1.34.0"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    def template(
        self, values: list[dict], release: str = "my-run", *more: str, chart: str = "helm/wandistill"
    ) -> subprocess.CompletedProcess[str]:
        """`helm template` with layers of values and `more` arguments."""
        flags = [part for layer in values for part in ("-f", _file(layer))]
        return self.run("template", release, chart, *flags, *more)


_files: dict[str, str] = {}
_folder: list[Path] = []


def _file(layer: dict) -> str:
    text = json.dumps(layer)
    if text not in _files:
        path = _folder[0] / f"{len(_files)}.yaml"
        path.write_text(text, encoding="utf-8")
        _files[text] = str(path)
    return _files[text]


@pytest.fixture(scope="session")
def helm(tmp_path_factory):
    """helm, with a folder for the tests' values."""
    _folder.append(tmp_path_factory.mktemp("values"))
    return Helm(_program("helm"))


@pytest.fixture(scope="session")
def kubeconform():
    """The program."""
    return _program("kubeconform")


def _program(name: str) -> str:
    try:
        return str(tool(name))
    except BuildError as error:
        pytest.exit(str(error), returncode=2)
