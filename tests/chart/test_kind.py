"""kind takes the cluster that `make kind` asks for, and where no container engine runs `make kind` says so.

kind asks a stand-in for Docker here, which fails as soon as a node is to run.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.cluster.kind import __main__ as kind
from tests.tools.build import tool

DOCKER = """\
#!/bin/sh
echo "$@" >> {log}
case "$1" in
  info) echo '{{"CgroupDriver": "systemd", "CgroupVersion": "2", "MemoryLimit": true, "PidsLimit": true}}' ;;
  run) exit 1 ;;
esac
"""


@pytest.fixture
def create(tmp_path):
    """Runs kind on a configuration; returns what it said, and what Docker was asked."""
    programs, log = tmp_path / "bin", tmp_path / "asked"
    programs.mkdir()
    log.touch()
    (programs / "docker").write_text(DOCKER.format(log=log))
    (programs / "docker").chmod(0o755)

    def run(text):
        (tmp_path / "cluster.yaml").write_text(text)
        command = [tool("kind"), "create", "cluster", f"--name={kind.NAME}", "--config=cluster.yaml"]
        command.append(f"--kubeconfig={tmp_path}/kubeconfig")
        environment = {**os.environ, "PATH": f"{programs}:/usr/bin:/bin", "KIND_EXPERIMENTAL_PROVIDER": "docker"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.stdout + done.stderr, log.read_text()

    return run


def test_kind_makes_two_nodes_of_the_configuration_that_share_a_folder(create, tmp_path):
    said, asked = create(kind.CONFIG.read_text(encoding="utf-8"))
    nodes = [line for line in asked.splitlines() if line.startswith("run ")]
    assert sorted(re.search(r"--name (\S+)", line).group(1) for line in nodes) == sorted(kind.NODES), said
    for line in nodes:
        assert f"{tmp_path}/volumes:{kind.VOLUMES}" in line


def test_kind_would_tell_a_key_that_it_does_not_know(create):
    said, asked = create(kind.CONFIG.read_text(encoding="utf-8").replace("containerPath", "containersPath"))
    assert "containersPath not found" in said and "run " not in asked


@pytest.mark.parametrize("installed", [False, True], ids=["not installed", "not running"])
def test_without_an_engine_that_runs_it_says_what_is_missing_and_what_needs_none(tmp_path, installed):
    if installed:
        shutil.copy("/bin/false", tmp_path / "podman")
    command = [sys.executable, "-m", "tests.cluster.kind", "up"]
    done = subprocess.run(command, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1
    why = "podman is installed, but `podman info` fails" if installed else "neither is installed"
    assert f"kind needs Docker or podman, and neither runs here ({why})" in done.stderr
    assert "`make e2e` needs neither" in done.stderr
