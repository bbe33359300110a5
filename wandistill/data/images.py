"""Latents x0 of pictures: cut to the run's resolution, encoded by the teacher's VAE, cached by their content.

A picture is known by the hash of its file, so it may move and be renamed. Hashing reads every byte; so that a large
folder is read once and not at every start, the hash of a path is cached too, for as long as size and time of change
stay the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from wandistill.data.building import Compute, Work, fill
from wandistill.data.embeddings import free_memory
from wandistill.data.latents import LatentCache
from wandistill.data.store import Store
from wandistill.errors import ConfigError
from wandistill.models.wan import WanFolder
from wandistill.train.distributed import World

# Pixels in one forward of the VAE: 2 pictures of 832x480, 64 of 64x64.
_BATCH_PIXELS = 2**20
_MOST_PICTURES = 64
_HASH_BATCH = 256


def picture_hashes(paths: Sequence[Path], cache_dir: Path, world: World) -> list[str]:
    """The content hash of each file, in hexadecimal; read where path, size or time of change are new."""
    stats = [path.stat() for path in paths]
    keys = [f"{stat.st_size} {stat.st_mtime_ns} {path.absolute()}" for path, stat in zip(paths, stats, strict=True)]
    store = Store(cache_dir, "picture_hashes", {"hash": "BLAKE2b-128 of the file"})
    path_of = dict(zip(keys, paths, strict=True))

    def compute(batch: list[str]) -> list[dict[str, Tensor]]:
        return [{"hash": torch.frombuffer(bytearray(_hash(path_of[key])), dtype=torch.uint8)} for key in batch]

    fill(Work("picture hashes", store, keys, _HASH_BATCH, lambda _: 32.0), world, lambda: compute)
    return [bytes(row).hex() for row in store.read_column(keys, "hash")]


def picture_work(folder: WanFolder, hashes: Sequence[str], resolution: tuple[int, int], cache_dir: Path) -> Work:
    """The pictures' latents as a cache to be filled."""
    width, height = resolution
    shape = folder.latent_shape(width, height)
    ingredients = {
        "vae": folder.fingerprint("vae"),
        "resolution": [width, height],
        "latent_shape": list(shape),
        "pixels": "upright, on white, scaled to cover (Lanczos), cut at the centre; mode of the posterior",
    }
    batch_size = max(1, min(_MOST_PICTURES, _BATCH_PIXELS // (width * height)))
    store = Store(cache_dir, "pictures", ingredients)
    return Work("picture latents", store, hashes, batch_size, lambda _: 4.0 * math.prod(shape))


def encode_images(
    work: Work, folder: WanFolder, paths: Sequence[Path], resolution: tuple[int, int], world: World
) -> LatentCache:
    """Encodes the pictures that are missing, each rank its part; the VAE is loaded for that alone.

    Args:
        work: what `picture_work` gave.
        folder: the teacher's folder.
        paths: of the pictures, in the order of the work's hashes.
        resolution: width and height in pixels.
        world: the ranks; each calls this.

    Raises:
        ConfigError: a file is no picture, or the disk is full (DoesNotFit).
    """
    path_of = dict(zip(work.keys, paths, strict=True))

    def begin() -> Compute:
        vae = folder.load_vae(world.device)

        def compute(batch: list[str]) -> list[dict[str, Tensor]]:
            pixels = torch.stack([load_picture(path_of[key], resolution) for key in batch])
            latents = folder.encode(vae, pixels.unsqueeze(2).to(world.device)).float().cpu()
            return [{"x0": one} for one in latents]

        return compute

    fill(work, world, begin)
    free_memory(world.device)
    return LatentCache(work.store, work.keys)


def load_picture(path: Path, resolution: tuple[int, int]) -> Tensor:
    """Pixels [3, H, W] in -1..1: turned upright, on white, scaled to cover the resolution, cut at the centre.

    Raises:
        ConfigError: the file is damaged, no picture, or has more than 8 bits a channel.
    """
    try:
        with Image.open(path) as file:
            picture = ImageOps.exif_transpose(file)
            if picture.mode.startswith(("I", "F")):
                raise ConfigError(f"The picture {path} has more than 8 bits a channel: convert it to 8-bit RGB.")
            if "A" in picture.getbands() or "transparency" in picture.info:
                picture = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
            fitted = ImageOps.fit(picture.convert("RGB"), resolution, Image.Resampling.LANCZOS)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigError(f"The picture {path} cannot be read ({error}): replace it or take it out.") from error
    values: Any = np.asarray(fitted, dtype=np.float32)
    return torch.from_numpy(values).permute(2, 0, 1) / 127.5 - 1


def _hash(path: Path) -> bytes:
    hasher = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while block := file.read(2**20):
                hasher.update(block)
    except OSError as error:
        raise ConfigError(f"The picture {path} cannot be read ({error.strerror}): check its permissions.") from error
    return hasher.digest()
