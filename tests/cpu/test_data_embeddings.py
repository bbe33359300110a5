"""Prompt embeddings: exact, small on disk, encoded once, and never those of another encoder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data_helpers import world

from wandistill.data import embeddings as module
from wandistill.data.embeddings import EmbeddingCache, OnlineEmbeddings, build_embeddings, embedding_work
from wandistill.errors import ConfigError
from wandistill.models.wan import WanFolder, open_teacher
from wandistill.models.wan_text import encode_prompts

PROMPTS = ["a red circle", "a cat on a gray background", "a red circle", "blue"]


@pytest.fixture
def folder(tiny_wan: Callable[[str], Path]) -> WanFolder:
    return open_teacher(str(tiny_wan("t2v-a14b")))


def build(
    folder: WanFolder, cache_dir: Path, prompts: list[str] = PROMPTS, dtype: torch.dtype = torch.float32
) -> EmbeddingCache:
    work = embedding_work(folder, prompts, cache_dir, dtype)
    return build_embeddings(work, folder, dtype, world())


def count_loads(folder: WanFolder, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    loads: list[Any] = []
    load = folder.load_text_encoder
    monkeypatch.setattr(folder, "load_text_encoder", lambda *args: loads.append(args) or load(*args))
    return loads


def test_a_cached_embedding_is_the_pipelines_own_with_its_zero_tail(folder: WanFolder, tmp_path: Path) -> None:
    cached = build(folder, tmp_path).batch(PROMPTS)
    encoder = folder.load_text_encoder(torch.float32, "cpu")
    direct, lengths = encode_prompts(folder, folder.load_tokenizer(), encoder, PROMPTS)
    assert cached.shape == (4, folder.token_length, folder.architecture.text_dim)
    assert cached.dtype == torch.float32
    torch.testing.assert_close(cached, direct, rtol=1e-5, atol=1e-6)
    for row, length in zip(cached, lengths.tolist(), strict=True):
        assert row[length:].abs().max() == 0
        assert row[length - 1].abs().max() > 0


def test_the_zero_tail_is_not_on_disk(folder: WanFolder, tmp_path: Path) -> None:
    prompts = ["cat " * (1 + index % 3) + str(index) for index in range(60)]
    build(folder, tmp_path, prompts)
    written = sum(path.stat().st_size for path in tmp_path.rglob("shard-*"))
    tokens = sum(map(len, folder.load_tokenizer()([*prompts, ""]).input_ids))
    bare = tokens * folder.architecture.text_dim * 4
    assert bare < written < bare + 61 * 64 + 1000
    assert written < 0.05 * 61 * folder.token_length * folder.architecture.text_dim * 4


def test_the_empty_negative_prompt_is_always_there(folder: WanFolder, tmp_path: Path) -> None:
    cache = build(folder, tmp_path)
    assert cache.negative().shape == (1, folder.token_length, folder.architecture.text_dim)
    with pytest.raises(ConfigError, match="never encoded"):
        cache.negative("never encoded")


def test_only_missing_prompts_are_encoded_and_nothing_is_loaded_for_none(
    folder: WanFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = count_loads(folder, monkeypatch)
    encoded: list[str] = []
    encode = module.encode_prompts
    monkeypatch.setattr(module, "encode_prompts", lambda *args: encoded.extend(args[3]) or encode(*args))
    first = build(folder, tmp_path).batch(PROMPTS)
    assert sorted(set(encoded)) == sorted({"", *PROMPTS})
    assert len(encoded) == 4, "a repeated prompt is encoded once"
    assert len(loads) == 1
    again = build(folder, tmp_path).batch(PROMPTS)
    assert len(loads) == 1, "everything is there: no text encoder"
    assert torch.equal(first, again)
    encoded.clear()
    build(folder, tmp_path, [*PROMPTS, "a cat"])
    assert set(encoded) == {"a cat"}


def test_embeddings_of_another_dtype_length_or_encoder_are_not_reused(
    folder: WanFolder, tiny_wan_copy: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(other: WanFolder, dtype: torch.dtype) -> int:
        work = embedding_work(other, PROMPTS, tmp_path, dtype)
        return len(work.store.missing(work.keys)[0])

    build(folder, tmp_path)
    assert missing(folder, torch.float32) == 0
    assert missing(folder, torch.bfloat16) == 4

    from safetensors.torch import load_file, save_file

    copy = tiny_wan_copy("t2v-a14b")
    shard = sorted((copy / "text_encoder").glob("*.safetensors"))[0]
    tensors = load_file(shard)
    save_file({name: tensor + 0.5 for name, tensor in tensors.items()}, shard, metadata={"format": "pt"})
    assert missing(open_teacher(str(copy)), torch.float32) == 4

    monkeypatch.setattr(folder, "token_length", 77)
    assert missing(folder, torch.float32) == 4


def test_half_embeddings_are_the_encoders_values_rounded(folder: WanFolder, tmp_path: Path) -> None:
    half = build(folder, tmp_path, dtype=torch.bfloat16).batch(PROMPTS)
    full = build(folder, tmp_path).batch(PROMPTS)
    assert torch.equal(half, half.bfloat16().float())
    torch.testing.assert_close(half, full, rtol=0.05, atol=0.05)


def test_online_embeddings_are_the_same_and_do_not_depend_on_what_came_before(
    folder: WanFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KEPT_PROMPTS", 2)
    online = OnlineEmbeddings(folder, torch.float32, torch.device("cpu"))
    first = online.batch(PROMPTS)
    torch.testing.assert_close(first, build(folder, tmp_path).batch(PROMPTS), rtol=1e-5, atol=1e-6)
    fresh = OnlineEmbeddings(folder, torch.float32, torch.device("cpu"))
    backwards = fresh.batch(PROMPTS[::-1]).flip(0)
    assert torch.equal(first, backwards)
    assert torch.equal(online.negative(), fresh.batch([""]))
    assert len(online._kept) == 2


def test_prompts_that_are_too_long_are_counted_in_every_run(folder: WanFolder, tmp_path: Path) -> None:
    long = "circle " * (folder.token_length + 10)
    prompts = ["a cat", long, "blue", long + "again"]
    assert build(folder, tmp_path, prompts).truncated(prompts) == 2
    assert build(folder, tmp_path, prompts).truncated(prompts[:2]) == 1
    assert OnlineEmbeddings(folder, torch.float32, torch.device("cpu")).truncated(prompts) == 2


def test_an_embedding_that_is_not_finite_is_never_cached(
    folder: WanFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = module.encode_prompts

    def overflow(*args: Any) -> Any:
        hidden, lengths = encode(*args)
        hidden[args[3].index("blue")] = float("inf")
        return hidden, lengths

    monkeypatch.setattr(module, "encode_prompts", overflow)
    with pytest.raises(ConfigError, match="'blue' is not finite"):
        build(folder, tmp_path, ["blue"])
    work = embedding_work(folder, ["blue"], tmp_path, torch.float32)
    assert "blue" in work.store.missing(work.keys)[0]


def test_the_estimate_is_close_to_what_is_written(folder: WanFolder, tmp_path: Path) -> None:
    prompts = [f"a cat left of {index} circles" for index in range(50)]
    work = embedding_work(folder, prompts, tmp_path, torch.float32)
    missing, _ = work.store.missing(work.keys)
    estimate = work.item_bytes(missing) * len(missing)
    build(folder, tmp_path, prompts)
    written = sum(path.stat().st_size for path in tmp_path.rglob("shard-*"))
    assert estimate <= written <= estimate + 50 * 64 + 1000


def test_logging_stays_quiet_when_nothing_is_built(
    folder: WanFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    build(folder, tmp_path)
    capsys.readouterr()
    with caplog.at_level(logging.INFO, "wandistill.data"):
        build(folder, tmp_path)
    assert capsys.readouterr().err == ""
    assert not caplog.records
