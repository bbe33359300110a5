"""From what --teacher_path says to a folder: hub ids, original checkpoints, and things that are neither."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from wandistill.errors import ConfigError
from wandistill.models.wan_hub import TEXT_TO_VIDEO_IDS, resolve_folder


@pytest.mark.parametrize("hub_id", [name.removesuffix("-Diffusers") for name in TEXT_TO_VIDEO_IDS])
def test_the_id_of_an_original_checkpoint_is_answered_with_the_diffusers_one(hub_id):
    with pytest.raises(ConfigError, match=f"use {hub_id}-Diffusers instead"):
        resolve_folder(hub_id)


@pytest.mark.parametrize("hub_id", ["Wan-AI/Wan2.1-I2V-14B-480P", "Wan-AI/Wan2.1-VACE-14B", "Wan-AI/Wan9"])
def test_another_original_id_is_answered_with_the_ids_that_work(hub_id):
    with pytest.raises(ConfigError, match=r"not a text-to-video Wan .*Wan2.2-T2V-A14B-Diffusers"):
        resolve_folder(hub_id)


@pytest.mark.parametrize(
    ("files", "config", "answer"),
    [
        (["Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth"], {"dim": 1536}, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
        (["Wan2.1_VAE.pth"], {"dim": 5120}, "Wan-AI/Wan2.1-T2V-14B-Diffusers"),
        (["Wan2.2_VAE.pth"], {"model_type": "ti2v", "dim": 3072}, "Wan-AI/Wan2.2-TI2V-5B-Diffusers"),
        ([], {"dim": 5120}, "Wan-AI/Wan2.1-T2V-14B-Diffusers"),
        (["high_noise_model/x", "low_noise_model/x", "Wan2.1_VAE.pth"], None, "Wan-AI/Wan2.2-T2V-A14B-Diffusers"),
        (["Wan2.1_VAE.pth"], {"model_type": "i2v", "dim": 5120}, "image-to-video.*text-to-video model"),
    ],
)
def test_an_original_folder_is_answered_with_its_diffusers_id(tmp_path, files, config, answer):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps({"_class_name": "WanModel", "model_type": "t2v", **config}))
    with pytest.raises(ConfigError, match=f"original Wan checkpoint.*{answer}"):
        resolve_folder(str(tmp_path))


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no model_index\.json"):
        resolve_folder(str(tmp_path))


def test_one_component_is_answered_with_the_folder_above(tiny_wan):
    path = tiny_wan("t2v-1.3b")
    with pytest.raises(ConfigError, match=f"one component of a pipeline: give the folder above it, {path}"):
        resolve_folder(str(path / "transformer"))


def test_a_file_is_refused(tiny_wan):
    with pytest.raises(ConfigError, match="is a file, but a teacher is a folder"):
        resolve_folder(str(tiny_wan("t2v-1.3b") / "model_index.json"))


@pytest.mark.parametrize("name", ["/no/such/folder", "nothing", "./a/b", "../wan", "a/b/c"])
def test_a_path_that_is_not_there_is_answered_with_where_it_was_looked_for(name):
    with pytest.raises(ConfigError, match=f"looked for the folder {Path(name).absolute()}"):
        resolve_folder(name)


def test_a_folder_has_no_revision(tiny_wan):
    with pytest.raises(ConfigError, match="only a hub id has revisions"):
        resolve_folder(str(tiny_wan("t2v-1.3b")), "v1")


class TestOffline:
    """HF_HUB_OFFLINE=1, in a process of its own: huggingface_hub reads the environment when it is imported."""

    ID = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    PROGRAM = """
import sys
from wandistill.errors import ConfigError
from wandistill.models.wan_hub import resolve_folder
try:
    print(resolve_folder(sys.argv[1]))
except ConfigError as error:
    sys.exit(str(error))
"""

    def open(self, cache: Path) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", self.PROGRAM, self.ID],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)},
            capture_output=True,
            text=True,
        )

    def test_an_id_that_is_not_cached_names_the_folder_and_the_cache(self, tmp_path):
        done = self.open(tmp_path)
        assert done.returncode == 1
        assert f"--teacher_path {self.ID} was not found" in done.stderr
        assert str(Path(self.ID).absolute()) in done.stderr
        assert str(tmp_path) in done.stderr
        assert "HF_HUB_OFFLINE is set" in done.stderr
        assert "Traceback" not in done.stderr

    def test_an_id_in_the_cache_is_found(self, tmp_path, tiny_wan):
        repository = tmp_path / f"models--{self.ID.replace('/', '--')}"
        snapshot = repository / "snapshots" / ("0" * 40)
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        shutil.copytree(tiny_wan("t2v-1.3b"), snapshot)
        done = self.open(tmp_path)
        assert done.stdout.strip() == str(snapshot), done.stderr


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("status", "the Hugging Face hub answered with status 404"),
        ("disk", "could not be downloaded into .*No space left on device"),
        ("partial", "is only in part in /cache/snapshot"),
    ],
)
def test_a_download_that_fails_says_why(monkeypatch, tmp_path, failure, message):
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def download(*args: object, **kwargs: object) -> str:
        if failure == "disk":
            raise OSError(28, "No space left on device")
        if failure == "partial":
            error = LocalEntryNotFoundError("incomplete")
            error.snapshot_path = "/cache/snapshot"
            raise error
        error = HfHubHTTPError.__new__(HfHubHTTPError)
        error.response = type("Response", (), {"status_code": 404})()
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        resolve_folder("someone/wan")


def test_only_what_a_teacher_needs_is_downloaded_at_the_revision_that_is_asked_for(monkeypatch, tiny_wan, tmp_path):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked, made = {}, tiny_wan("t2v-a14b")

    def download(hub_id: str, revision: str | None, allow_patterns: list[str], **options: object) -> str:
        asked[hub_id, revision] = allow_patterns
        return str(made)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    resolve_folder("Wan-AI/Wan2.2-T2V-A14B-Diffusers", "v1")
    files = [str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()]
    extra = ["README.md", "assets/comp_effic.png", "transformer/diffusion_pytorch_model.bin", "examples/a.mp4"]
    ((asked_for, patterns),) = asked.items()
    assert asked_for == ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", "v1")
    assert sorted(filter_repo_objects([*files, *extra], allow_patterns=patterns)) == sorted(files)
