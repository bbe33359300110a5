"""The files of a store: shards of items, written whole or not at all.

A shard is a safetensors file. `digests` [n, 2] uint64 names its items; every field is a tensor [n, ...] with a row an
item, or, where items differ in length, one tensor of all rows end to end and `FIELD.offsets` [n + 1] between them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from wandistill.errors import ConfigError, DoesNotFit
from wandistill.units import MIB, format_bytes

SHARD_PATTERN = "shard-*.safetensors"
DIGESTS = "digests"

# One shard's bytes; a writer holds about three times as much.
_SHARD_BYTES = 256 * MIB
# Work older than this is written although the shard is small, so that a killed run loses little of it.
_FLUSH_SECONDS = 600.0
# A temporary file that nobody wrote to for so long was left by a process that was killed.
_ABANDONED_SECONDS = 900.0


def digests_of(keys: Iterable[str]) -> np.ndarray:
    """128 bits [n, 2] (uint64) of each key, by BLAKE2b."""
    raw = b"".join(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest() for key in keys)
    return np.frombuffer(raw, dtype="<u8").reshape(-1, 2)


def offsets_name(field: str) -> str:
    """The tensor that says where each item of a variable-length field begins and ends."""
    return f"{field}.offsets"


def read_digests(path: Path) -> np.ndarray | None:
    """The digests [n, 2] of a shard's items, or None if the file is damaged: cut short, or no shard at all.

    Only the header and the digests are read; the file's size must be the one that the header gives.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                return None
            header = json.loads(file.read(length))
            spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
            if size != 8 + length + max(end for _, end in spans.values()):
                return None
            begin, end = spans[DIGESTS]
            file.seek(8 + length + begin)
            return np.frombuffer(file.read(end - begin), dtype="<u8").reshape(header[DIGESTS]["shape"])
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that it is there whole or not at all, even if the machine stops.

    Raises:
        DoesNotFit: the disk is full.
        ConfigError: the file cannot be written for another reason.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFit(
                f"The disk is full: {path} needs {format_bytes(len(content))}, "
                f"{format_bytes(free_bytes(path))} are free. Free some space or move the cache with --cache_dir; what "
                "was built so far is kept, and the same command goes on from there."
            ) from error
        raise ConfigError(
            f"The cache file {path} cannot be written ({error.strerror}): give a folder that this user may write to "
            "with --cache_dir."
        ) from error


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the disk of `path`, which need not exist yet."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def remove_abandoned(folder: Path) -> None:
    """Removes what killed writers left half-written."""
    for partial in folder.glob(".*.partial"):
        try:
            if time.time() - partial.stat().st_mtime > _ABANDONED_SECONDS:
                partial.unlink()
        except FileNotFoundError:
            continue  # another rank was faster


def _sync_folder(folder: Path) -> None:
    """Makes a rename last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ShardWriter:
    """Collects items and writes them as shards; a context that writes the rest at its end, after an error too.

    Any number of writers may fill one folder at once: a shard is named by the items in it.

    Args:
        folder: where shards go.
        ragged: fields whose items differ in their first size.
        shard_bytes: size at which a shard is written.
    """

    def __init__(self, folder: Path, ragged: Iterable[str] = (), shard_bytes: int = _SHARD_BYTES) -> None:
        self._folder, self._ragged, self._shard_bytes = folder, frozenset(ragged), shard_bytes
        self._keys: list[str] = []
        self._items: list[dict[str, Tensor]] = []
        self._bytes = 0
        self._written = time.monotonic()

    def add(self, key: str, item: Mapping[str, Tensor]) -> None:
        """Takes a copy of one item's fields."""
        # A clone: a slice of a padded batch would keep the whole batch in memory.
        fields = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in item.items()}
        self._keys.append(key)
        self._items.append(fields)
        self._bytes += sum(tensor.nbytes for tensor in fields.values())

    def flush_if_due(self) -> None:
        """Writes a shard if enough bytes or minutes have come together; call it between batches."""
        if self._bytes >= self._shard_bytes or time.monotonic() - self._written > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes what was added since the last shard.

        Raises:
            DoesNotFit, ConfigError: see `write_atomically`.
        """
        keys, items = self._keys, self._items
        self._keys, self._items, self._bytes, self._written = [], [], 0, time.monotonic()
        if not keys:
            return
        digests = digests_of(keys)
        tensors = {DIGESTS: torch.from_numpy(digests.copy())}
        for name in items[0]:
            parts = [item[name] for item in items]
            if name in self._ragged:
                lengths = torch.tensor([0, *(len(part) for part in parts)])
                tensors |= {name: torch.cat(parts), offsets_name(name): lengths.cumsum(0)}
            else:
                tensors[name] = torch.stack(parts)
        name = hashlib.blake2b(digests.tobytes(), digest_size=10).hexdigest()
        write_atomically(self._folder / f"shard-{name}.safetensors", safetensors.torch.save(tensors))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After Ctrl-C or a failing batch the items that are whole are kept; after a failed write there are none left.
        self.flush()
