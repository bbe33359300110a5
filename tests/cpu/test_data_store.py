"""A store keeps what was written, never shows what was half-written or made from something else, and stays fast."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from data_helpers import rank_fills_store, run_processes
from torch import Tensor

from wandistill.data import shards
from wandistill.data.shards import ShardWriter, digests_of
from wandistill.data.store import Store
from wandistill.errors import ConfigError, DoesNotFit

INGREDIENTS = {"weights": "abc", "dtype": "float32", "shift": 3.0}


def item(value: float, length: int = 2) -> dict[str, Tensor]:
    return {"fixed": torch.full((3, 2), value), "ragged": torch.full((length, 4), value, dtype=torch.bfloat16)}


def open_store(root: Path, **changes: object) -> Store:
    return Store(root, "things", {**INGREDIENTS, **changes}, ragged=["ragged"])


def filled_store(root: Path, shards_of: int = 4, count: int = 10) -> Store:
    store = open_store(root)
    store.begin_writing()
    with store.writer() as writer:
        for index in range(count):
            writer.add(f"item {index}", item(index, index % 3 + 1))
            if index % shards_of == shards_of - 1:
                writer.flush()
    store.refresh()
    return store


def test_items_come_back_in_the_order_asked_for(tmp_path: Path) -> None:
    store = filled_store(tmp_path)
    keys = ["item 7", "item 0", "item 7", "item 5"]
    assert [float(value[0, 0]) for value in store.read(keys, "fixed")] == [7, 0, 7, 5]
    ragged = store.read(keys, "ragged")
    assert [len(value) for value in ragged] == [2, 1, 2, 3]
    assert ragged[3].dtype == torch.bfloat16
    assert torch.equal(ragged[3], item(5, 3)["ragged"])


def test_one_step_of_an_item_can_be_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.begin_writing()
    with store.writer() as writer:
        writer.add("a", {"steps": torch.arange(6.0).view(3, 2)})
    store.refresh()
    assert store.read(["a"], "steps", [2])[0].tolist() == [4.0, 5.0]


def test_missing_names_each_absent_key_once_in_order(tmp_path: Path) -> None:
    store = filled_store(tmp_path)
    assert store.missing(["z", "item 1", "y", "z", "item 1"]) == (["z", "y"], 3)
    with pytest.raises(ConfigError, match="lacks 1 of 2 items asked for, the first is 'z'"):
        store.read(["item 1", "z"], "fixed")


@pytest.mark.parametrize("change", [{"weights": "abd"}, {"dtype": "bfloat16"}, {"shift": 5.0}, {"more": None}])
def test_a_store_of_other_ingredients_is_another_folder(tmp_path: Path, change: dict[str, object]) -> None:
    filled_store(tmp_path)
    other = open_store(tmp_path, **change)
    assert len(other) == 0
    assert other.missing(["item 1"]) == (["item 1"], 1)


def test_the_folder_spells_its_ingredients_out(tmp_path: Path) -> None:
    store = filled_store(tmp_path)
    meta = json.loads((store.folder / "meta.json").read_text())
    assert meta == {"schema": 1, "kind": "things", "ingredients": INGREDIENTS}


@pytest.mark.parametrize("damage", ["other ingredients", "no meta", "broken meta"])
def test_a_folder_whose_meta_does_not_fit_is_refused(tmp_path: Path, damage: str) -> None:
    meta = filled_store(tmp_path).folder / "meta.json"
    if damage == "no meta":
        meta.unlink()
    elif damage == "broken meta":
        meta.write_text("{")
    else:
        meta.write_text(meta.read_text().replace("abc", "abd"))
    with pytest.raises(ConfigError, match="is not what its name says"):
        open_store(tmp_path)


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def damage_longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[:8] = b"\xff" * 8
    path.write_bytes(content)


def damage_text(path: Path) -> None:
    path.write_bytes(b"\x04\0\0\0\0\0\0\0[1]\n")


def damage_foreign(path: Path) -> None:
    path.write_bytes(safetensors.torch.save({"x": torch.zeros(3)}))


@pytest.mark.parametrize(
    "damage", [damage_cut, damage_longer, damage_empty, damage_header, damage_text, damage_foreign]
)
def test_a_damaged_shard_is_dropped_with_a_warning_and_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object
) -> None:
    store = filled_store(tmp_path, shards_of=5)
    victim = sorted(store.folder.glob("shard-*"))[0]
    damage(victim)  # type: ignore[operator]
    store = open_store(tmp_path)
    assert str(victim) in caplog.text and "damaged" in caplog.text
    lost, _ = store.missing([f"item {i}" for i in range(10)])
    assert len(lost) == 5
    store.begin_writing()
    assert not victim.exists()
    with store.writer() as writer:
        for key in lost:
            writer.add(key, item(99))
    store.refresh()
    assert store.missing([f"item {i}" for i in range(10)]) == ([], 10)
    assert len(list(store.folder.glob("shard-*"))) == 2


def test_a_killed_writer_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    store = filled_store(tmp_path, count=8)
    shard = sorted(store.folder.glob("shard-*"))[0]
    fresh, old = (store.folder / f".{shard.name}.{name}.partial" for name in ("fresh", "old"))
    for partial in (fresh, old):
        partial.write_bytes(shard.read_bytes()[:100])
    os.utime(old, (time.time() - 3600,) * 2)
    shard.unlink()
    store = open_store(tmp_path)
    assert len(store) == 4
    store.begin_writing()
    assert fresh.exists(), "another process may still be writing it"
    assert not old.exists()


def test_items_computed_before_an_error_are_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.begin_writing()
    with pytest.raises(KeyboardInterrupt), store.writer() as writer:
        writer.add("a", item(1))
        raise KeyboardInterrupt
    store.refresh()
    assert store.missing(["a"]) == ([], 1)


def test_a_full_disk_is_told_and_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled_store(tmp_path, count=4)
    before = sorted(store.folder.iterdir())

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shards.os, "fsync", no_space)
    with pytest.raises(DoesNotFit) as caught, store.writer() as writer:
        writer.add("new", item(1))
        writer.flush()
    for said in (str(store.folder), "needs", "are free", "--cache_dir"):
        assert said in str(caught.value)
    assert sorted(store.folder.iterdir()) == before
    assert len(open_store(tmp_path)) == 4


def test_a_folder_that_cannot_be_written_is_a_bad_configuration(tmp_path: Path) -> None:
    (tmp_path / "things").write_text("a file where the folder must be")
    with pytest.raises(ConfigError, match="cannot be written"):
        open_store(tmp_path).begin_writing()


def test_a_shard_is_written_as_soon_as_it_is_large_enough(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, ["ragged"], shard_bytes=100) as writer:
        for index in range(10):
            writer.add(str(index), item(index))
            writer.flush_if_due()
    assert len(list(tmp_path.glob("shard-*"))) == 5  # 24 and 16 bytes an item: three reach 100


def test_two_processes_write_one_store_at_once(tmp_path: Path) -> None:
    assert run_processes(2, rank_fills_store, tmp_path, 40) == [[float(index) for index in range(40)]] * 2


def test_two_hundred_thousand_items_are_indexed_and_found_in_seconds(tmp_path: Path) -> None:
    count, shard = 200_000, 10_000
    keys = [f"a photograph number {index} of something" for index in range(count)]
    store = open_store(tmp_path)
    store.begin_writing()
    for start in range(0, count, shard):
        tensors = {
            "digests": torch.from_numpy(digests_of(keys[start : start + shard]).copy()),
            "fixed": torch.arange(start, start + shard),
        }
        (store.folder / f"shard-{start}.safetensors").write_bytes(safetensors.torch.save(tensors))
    began = time.process_time()
    store.refresh()
    assert store.missing([*keys, "new"]) == (["new"], count + 1)
    chosen = np.random.default_rng(0).integers(count, size=2000)
    values = store.read([keys[index] for index in chosen], "fixed")
    assert time.process_time() - began < 5
    assert [int(value) for value in values] == chosen.tolist()
    assert (store.read_column(keys, "fixed") == np.arange(count)).all()
    index_bytes = sum(array.nbytes for array in (store._high, store._low, store._shard, store._row))
    assert index_bytes == 32 * count
