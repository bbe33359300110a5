"""helm for the chart's tests: of the pinned version from PATH, else built from Go modules into the cache."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The repository itself, for `tests.generate_chart`.
sys.path.insert(0, str(ROOT))

VERSION = "v3.22.0"
PACKAGE = "helm.sh/helm/v3/cmd/helm"


def _helm() -> str:
    """The program; Go's checksum database vouches for what is built."""
    found = shutil.which("helm")
    if found and _version(found).startswith(VERSION.rpartition(".")[0]):
        return found
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    program = cache / f"wandistill/bin-helm-{VERSION}/helm"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        if not shutil.which("go"):
            pytest.exit(f"the chart's tests need helm {VERSION} on PATH, or Go to build it", returncode=2)
        environment = {**os.environ, "GOBIN": str(program.parent), "CGO_ENABLED": "0"}
        subprocess.run(["go", "install", f"{PACKAGE}@{VERSION}"], env=environment, cwd=program.parent, check=True)
    return str(program)


def _version(program: str) -> str:
    done = subprocess.run([program, "version", "--template", "{{.Version}}"], capture_output=True, text=True)
    return done.stdout.strip()


class Helm:
    """Runs helm on the chart."""

    def __init__(self, program: str) -> None:
        self.program = program

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """helm with these arguments, whatever its exit code."""
        # A helm that `go build` made, without its release's flags, takes the cluster for Kubernetes 1.20.
        command = [self.program, *arguments, "--kube-version", "1.34.0"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    def template(self, values: list[dict], release: str = "my-run", *more: str) -> subprocess.CompletedProcess[str]:
        """`helm template` with layers of values and `more` arguments."""
        flags = [part for layer in values for part in ("-f", _file(layer))]
        return self.run("template", release, "helm/wandistill", *flags, *more)


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
    return Helm(_helm())
