"""A cache on disk: items found by a text key, in a folder whose name says what they were made from.

    CACHE_DIR/KIND/KEY/meta.json                  every ingredient of KEY, in clear
                      /shard-<digest>.safetensors

KEY is a hash of the ingredients, so a cache made from other weights, another dtype or another setting is another
folder, and is never read by mistake. Writers add shards and never change one; readers map them into memory and touch
the rows that they need. The index in memory takes 32 bytes an item.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wandistill.data.shards import (
    SHARD_PATTERN,
    ShardWriter,
    digests_of,
    offsets_name,
    read_digests,
    remove_abandoned,
    write_atomically,
)
from wandistill.errors import ConfigError

_log = logging.getLogger(__name__)

_SCHEMA = 1
_MAPPED_SHARDS = 256


class Store:
    """One cache folder, as it was when it was opened or last refreshed.

    Args:
        root: the folder of all caches.
        kind: what the items are, a folder name.
        ingredients: everything that the items' content depends on beside their keys; JSON values.
        ragged: the fields whose items differ in their first size.

    Raises:
        ConfigError: the folder's meta.json doesn't belong to its name.
    """

    def __init__(self, root: Path, kind: str, ingredients: Mapping[str, Any], ragged: Collection[str] = ()) -> None:
        self._meta = json.loads(json.dumps({"schema": _SCHEMA, "kind": kind, "ingredients": dict(ingredients)}))
        canonical = json.dumps(self._meta, sort_keys=True, separators=(",", ":"))
        self.folder = root / kind / hashlib.sha256(canonical.encode()).hexdigest()[:24]
        self._ragged = frozenset(ragged)
        self.refresh()

    def refresh(self) -> None:
        """Reads the index again, with what other processes have added."""
        paths = sorted(self.folder.glob(SHARD_PATTERN))
        self._check_meta(bool(paths))
        self._mapped: OrderedDict[int, dict[str, Tensor]] = OrderedDict()
        self._shards: list[Path] = []
        self._damaged: list[Path] = []
        parts: list[np.ndarray] = []
        for path in paths:
            digests = read_digests(path)
            if digests is None:
                _log.warning(f"{path} is damaged (cut short, or not a shard): its items are built again.")
                self._damaged.append(path)
            else:
                self._shards.append(path)
                parts.append(digests)
        self._index(parts)

    def __len__(self) -> int:
        return len(self._high)

    def missing(self, keys: Sequence[str]) -> tuple[list[str], int]:
        """The keys that have no item yet, each once, in their order; and how many different keys there are."""
        digests = digests_of(keys)
        absent = dict.fromkeys(keys[int(i)] for i in np.flatnonzero(self._find(digests) < 0))
        return list(absent), len(np.unique(digests[:, 0]))

    def begin_writing(self) -> None:
        """Makes the folder ready: every rank calls it, and none writes before all have."""
        write_atomically(self.folder / "meta.json", json.dumps(self._meta, indent=2, sort_keys=True).encode())
        remove_abandoned(self.folder)
        for path in self._damaged:
            path.unlink(missing_ok=True)

    def writer(self) -> ShardWriter:
        """Adds items; `refresh` shows them."""
        return ShardWriter(self.folder, self._ragged)

    def read(self, keys: Sequence[str], field: str, steps: Sequence[int] | None = None) -> list[Tensor]:
        """One field of each item; with `steps`, only that index of its first size.

        Raises:
            ConfigError: an item isn't there.
        """
        positions = self._positions(keys)
        chosen: Sequence[int | None] = [None] * len(keys) if steps is None else steps
        return [self._read_row(position, field, step) for position, step in zip(positions, chosen, strict=True)]

    def read_column(self, keys: Sequence[str], field: str) -> np.ndarray:
        """A field of small fixed-shape items for many keys [n, ...]; reads that field of every shard whole."""
        positions = self._positions(keys)
        columns = [self._open(shard)[field].numpy() for shard in range(len(self._shards))]
        starts = np.cumsum([0, *(len(column) for column in columns)])
        return np.concatenate(columns)[starts[self._shard[positions]] + self._row[positions]]

    def _check_meta(self, has_shards: bool) -> None:
        path = self.folder / "meta.json"
        try:
            found = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            found = None if has_shards else self._meta
        except OSError as error:
            raise ConfigError(
                f"The cache {self.folder} cannot be read ({error.strerror}): give a --cache_dir that this user may use."
            ) from error
        except ValueError:
            found = None
        if found != self._meta:
            raise ConfigError(
                f"The cache {self.folder} is not what its name says: its meta.json is missing or names other "
                f"ingredients than {json.dumps(self._meta['ingredients'], sort_keys=True)}. It was copied or changed "
                "by hand; delete this folder, or give another --cache_dir."
            )

    def _index(self, parts: list[np.ndarray]) -> None:
        """Sorts the items of all shards by digest."""
        digests = np.concatenate(parts) if parts else np.empty((0, 2), dtype="<u8")
        order = np.lexsort((digests[:, 1], digests[:, 0]))
        self._high, self._low = digests[order, 0], digests[order, 1]
        counts = [len(part) for part in parts]
        self._shard = np.repeat(np.arange(len(parts)), counts)[order]
        rows = [np.arange(count) for count in counts]
        self._row = (np.concatenate(rows) if rows else np.empty(0, dtype=np.int64))[order]

    def _find(self, wanted: np.ndarray) -> np.ndarray:
        """Positions in the index, -1 where there is no such item."""
        found = np.full(len(wanted), -1, dtype=np.int64)
        at = np.searchsorted(self._high, wanted[:, 0])
        open_ = np.arange(len(wanted))
        while len(open_):
            # Items that share the first 64 bits with the wanted one lie side by side.
            open_ = open_[at[open_] < len(self._high)]
            open_ = open_[self._high[at[open_]] == wanted[open_, 0]]
            same = self._low[at[open_]] == wanted[open_, 1]
            found[open_[same]] = at[open_[same]]
            open_ = open_[~same]
            at[open_] += 1
        return found

    def _positions(self, keys: Sequence[str]) -> np.ndarray:
        positions = self._find(digests_of(keys))
        absent = np.flatnonzero(positions < 0)
        if len(absent):
            raise ConfigError(
                f"The cache {self.folder} lacks {len(absent)} of {len(keys)} items asked for, the first is "
                f"{keys[absent[0]][:80]!r}: fill it with 'wandistill prepare'. With several nodes, --cache_dir must be "
                "on storage that all of them share."
            )
        return positions

    def _read_row(self, position: int, field: str, step: int | None) -> Tensor:
        tensors, row = self._open(int(self._shard[position])), int(self._row[position])
        if field in self._ragged:
            begin, end = tensors[offsets_name(field)][row : row + 2].tolist()
            return tensors[field][begin:end]
        return tensors[field][row] if step is None else tensors[field][row, step]

    def _open(self, shard: int) -> dict[str, Tensor]:
        """The tensors of a shard, mapped and not read; the shards used last stay mapped."""
        if shard in self._mapped:
            self._mapped.move_to_end(shard)
            return self._mapped[shard]
        path = self._shards[shard]
        try:
            with safe_open(path, framework="pt") as file:
                # On a CPU these are views of the mapped file, which outlives the handle.
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"The cache file {path} can't be opened any more ({error}): caches must not be changed while a run "
                "uses them; start the run again."
            ) from error
        self._mapped[shard] = tensors
        if len(self._mapped) > _MAPPED_SHARDS:
            self._mapped.popitem(last=False)
        return tensors
