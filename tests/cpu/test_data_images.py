"""Pictures become the latents that the VAE gives for their centre, found again by content."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_helpers import world
from PIL import Image

from wandistill.data import images as module
from wandistill.data.images import encode_images, load_picture, picture_hashes, picture_work
from wandistill.data.latents import LatentCache
from wandistill.errors import ConfigError
from wandistill.models.wan import WanFolder, open_teacher


@pytest.fixture
def folder(tiny_wan: Callable[[str], Path]) -> WanFolder:
    return open_teacher(str(tiny_wan("t2v-1.3b")))


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    generator = np.random.default_rng(0)
    paths = []
    for index, (size, suffix) in enumerate([((48, 32), "png"), ((20, 60), "jpg"), ((32, 32), "webp")]):
        paths.append(tmp_path / "pictures" / f"{index}.{suffix}")
        paths[-1].parent.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(256, size=(*size, 3), dtype=np.uint8)).save(paths[-1])
    return paths


def encode(folder: WanFolder, paths: list[Path], cache_dir: Path, size: tuple[int, int] = (32, 32)) -> LatentCache:
    hashes = picture_hashes(paths, cache_dir, world())
    return encode_images(picture_work(folder, hashes, size, cache_dir), folder, paths, size, world())


def test_latents_are_the_vaes_normalised_mode(folder: WanFolder, pictures: list[Path], tmp_path: Path) -> None:
    latents = encode(folder, pictures, tmp_path).batch([2, 0])
    assert latents.shape == (2, *folder.latent_shape(32, 32))
    pixels = torch.stack([load_picture(pictures[index], (32, 32)) for index in (2, 0)]).unsqueeze(2)
    direct = folder.encode(folder.load_vae("cpu"), pixels)
    torch.testing.assert_close(latents, direct, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "resolution"), [((60, 20), (16, 32)), ((20, 60), (32, 16)), ((7, 9), (32, 32)), ((33, 31), (16, 16))]
)
def test_a_picture_covers_the_resolution(tmp_path: Path, size: tuple[int, int], resolution: tuple[int, int]) -> None:
    path = tmp_path / "white.png"
    Image.new("RGB", size, "white").save(path)
    pixels = load_picture(path, resolution)
    assert pixels.shape == (3, resolution[1], resolution[0])
    assert pixels.min() == pixels.max() == 1, "no border"


def test_the_centre_is_kept(tmp_path: Path) -> None:
    picture = Image.new("RGB", (96, 32), "black")
    picture.paste((255, 0, 0), (32, 0, 64, 32))
    picture.save(tmp_path / "p.png")
    pixels = load_picture(tmp_path / "p.png", (32, 32))
    assert (pixels[0] == 1).all() and (pixels[1:] == -1).all()


def test_transparent_parts_are_white_and_gray_is_rgb(tmp_path: Path) -> None:
    Image.new("RGBA", (16, 16), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("L", (16, 16), 255).save(tmp_path / "gray.png")
    for name in ("clear.png", "gray.png"):
        assert (load_picture(tmp_path / name, (16, 16)) == 1).all()


def test_a_camera_turned_aside_is_turned_back(tmp_path: Path) -> None:
    picture = Image.new("RGB", (32, 16), "black")
    picture.paste((255, 255, 255), (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    picture.save(tmp_path / "p.png", exif=exif)
    pixels = load_picture(tmp_path / "p.png", (16, 32))
    assert (pixels[:, :16] == 1).all() and (pixels[:, 16:] == -1).all()


def test_a_moved_picture_is_not_encoded_again_and_a_changed_one_is(
    folder: WanFolder, pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = encode(folder, pictures, tmp_path).batch([0, 1, 2])
    loads: list[Any] = []
    load = folder.load_vae
    monkeypatch.setattr(folder, "load_vae", lambda device: loads.append(device) or load(device))
    moved = pictures[0].rename(pictures[0].with_name("moved.png"))
    paths = [moved, *pictures[1:]]
    assert torch.equal(encode(folder, paths, tmp_path).batch([0, 1, 2]), first)
    assert not loads
    Image.new("RGB", (32, 32), "red").save(moved)
    os.utime(moved, ns=(0, 0))
    changed = encode(folder, paths, tmp_path).batch([0, 1, 2])
    assert len(loads) == 1
    assert torch.equal(changed[1:], first[1:]) and not torch.equal(changed[0], first[0])


def test_files_are_hashed_once(pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = picture_hashes(pictures, tmp_path, world())
    monkeypatch.setattr(module, "_hash", lambda path: pytest.fail(f"{path} is read again"))
    assert picture_hashes(pictures, tmp_path, world()) == first


def test_another_resolution_or_vae_is_another_cache(
    folder: WanFolder, pictures: list[Path], tmp_path: Path, tiny_wan: Callable[[str], Path]
) -> None:
    encode(folder, pictures, tmp_path)
    hashes = picture_hashes(pictures, tmp_path, world())
    other = open_teacher(str(tiny_wan("ti2v-5b")))
    for work in (picture_work(folder, hashes, (32, 48), tmp_path), picture_work(other, hashes, (32, 32), tmp_path)):
        assert len(work.store.missing(work.keys)[0]) == 3


@pytest.mark.parametrize("damage", ["cut", "text", "deep"])
def test_a_picture_that_cannot_be_read_is_named(pictures: list[Path], damage: str) -> None:
    path = pictures[0]
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:200])
    elif damage == "text":
        path.write_bytes(b"no picture at all")
    else:
        Image.fromarray(np.zeros((16, 16), dtype=np.uint16)).save(path)
    with pytest.raises(ConfigError, match=str(path)):
        load_picture(path, (32, 32))
