"""The parts of the test cluster that need no cluster: its images, what runc adds, where built programs lie."""

import io
import json
import os
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cluster import conftest
from tests.cluster.local import __main__ as local
from tests.cluster.local import images, layout, runc
from tests.cluster.local.init import StartError
from tests.tools import build


def test_only_a_marked_container_shares_the_machine(tmp_path: Path):
    marked, plain = tmp_path / "marked.json", tmp_path / "plain.json"
    shm = {"destination": "/dev/shm", "type": "tmpfs"}
    marked.write_text(json.dumps({"process": {"env": ["PATH=/bin", "MARK=1"]}, "mounts": [shm]}))
    plain.write_text(json.dumps({"process": {"env": ["PATH=/bin"]}, "mounts": [shm]}))

    for config in (marked, plain):
        runc.share(config, "MARK", {"/inside": "/outside"})

    first, *rest = json.loads(marked.read_text())["mounts"]
    assert (first["source"], first["destination"], first["options"]) == ("/outside", "/inside", ["rbind", "ro"])
    assert rest == [shm]  # the pod's own mounts lie above
    assert json.loads(plain.read_text())["mounts"] == [shm]


def test_the_trainers_image_is_small_and_starts_the_launcher_as_another_user(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(images, "tool", lambda name: Path("/bin/true"))

    archives = {path.stem: path for path in images.write_images(tmp_path)}

    assert archives["train"].stat().st_size < 100_000
    with tarfile.open(archives["train"]) as archive:
        manifest = json.load(archive.extractfile("manifest.json"))
        config = json.load(archive.extractfile(manifest[0]["Config"]))
        layer = archive.extractfile(manifest[0]["Layers"][0]).read()
    assert manifest[0]["RepoTags"] == [layout.TRAIN_IMAGE]
    assert config["config"]["Entrypoint"] == ["wandistill", "launch"]
    assert config["config"]["User"] == "65532:65532"
    assert f"{layout.SHARED_MARK}=1" in config["config"]["Env"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as files:
        assert files.getmember("opt/e2e/bin/wandistill").mode == 0o755


def test_without_root_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 65532)

    with pytest.raises(StartError, match=r"not root.*set KUBECONFIG to a cluster of your own"):
        local.check_machine()


def test_a_changed_pin_is_built_anew(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "helm").mkdir()
    (tmp_path / "helm" / "go.mod").write_text("require helm.sh/helm/v3 v3.22.0\n")
    (tmp_path / "helm" / "go.sum").write_text("")
    monkeypatch.setattr(build, "MODULES", tmp_path)
    before = build.bin_dir("helm")

    (tmp_path / "helm" / "go.mod").write_text("require helm.sh/helm/v3 v3.22.1\n")

    assert before.is_relative_to(tmp_path / "cache" / "wandistill" / "tools")
    assert build.bin_dir("helm") != before


def test_what_failed_while_a_fixture_was_made_comes_with_its_pods_and_logs(monkeypatch):
    class Kubectl:
        namespace = "e2e-demo"

        def __init__(self, kubeconfig, namespace):
            self.asked = []

        def run(self, *arguments, seconds=0):
            self.asked.append(arguments[0])

        def describe(self):
            assert self.asked.count("delete") == 2  # of the start: the pods are still there
            return "--- logs of pod/master"

    monkeypatch.setattr(conftest, "Kubectl", Kubectl)
    cluster = SimpleNamespace(kubeconfig=None, remove_volumes=lambda kubectl: None, make_volumes=lambda kubectl: None)
    session = SimpleNamespace(stash=pytest.Stash())

    with pytest.raises(TimeoutError) as raised, conftest.own_namespace(cluster, "demo", session):
        raise TimeoutError("the demo did not end")

    assert raised.value.__notes__ == ["namespace e2e-demo\n--- logs of pod/master"]
    assert session.stash[conftest.FAILED] == {"e2e-demo"}
