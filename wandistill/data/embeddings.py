"""Prompt embeddings: encoded once into a cache on disk, or each when it is needed.

On disk an embedding has only its prompt's own tokens, in the text encoder's dtype; readers pad it with the zeros that
Wan was trained with. Shape names: B batch, L tokens (the teacher's token length), E embedding size.
"""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from wandistill.data.building import Compute, Work, fill
from wandistill.data.store import Store
from wandistill.errors import ConfigError
from wandistill.models.wan import WanFolder
from wandistill.models.wan_text import encode_prompts, truncated_prompts
from wandistill.teacher.resident import cpu_computes
from wandistill.train.distributed import World

_log = logging.getLogger(__name__)

# Tokens in one forward of the text encoder, padding counted: 8 prompts of 512.
_BATCH_TOKENS = 4096
_MOST_PROMPTS = 64
# Prompts whose tokens are counted to estimate the cache's size.
_ESTIMATE_SAMPLE = 1024
# Encoded prompts that OnlineEmbeddings keeps.
_KEPT_PROMPTS = 256


class Embeddings(Protocol):
    """Where prompt embeddings come from."""

    def batch(self, prompts: Sequence[str]) -> Tensor:
        """Embeddings [B, L, E], float32 on the CPU, zero after each prompt's end."""
        ...

    def negative(self, text: str = "") -> Tensor:
        """The embedding [1, L, E] of the negative prompt."""
        ...


class EmbeddingCache:
    """Embeddings read from disk.

    Args:
        store: a filled store of `embedding_work`.
        token_length: L.
    """

    def __init__(self, store: Store, token_length: int) -> None:
        self._store, self._token_length = store, token_length

    def batch(self, prompts: Sequence[str]) -> Tensor:
        """Embeddings [B, L, E], float32 on the CPU, zero after each prompt's end.

        Raises:
            ConfigError: a prompt isn't in the cache.
        """
        return _padded(self._store.read(prompts, "embedding"), self._token_length)

    def negative(self, text: str = "") -> Tensor:
        """The embedding [1, L, E] of the negative prompt; "" is always in the cache."""
        return self.batch([text])

    def truncated(self, prompts: Sequence[str]) -> int:
        """How many of the prompts have more tokens than L, so that their ends are not seen."""
        return int(self._store.read_column(prompts, "truncated").sum())


class OnlineEmbeddings:
    """Embeddings encoded when they are asked for, with the text encoder in memory all the time.

    A prompt is encoded alone, so that its embedding does not depend on which others were encoded before: a resumed
    run, which starts without them, gets the same bits.
    """

    def __init__(self, folder: WanFolder, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype = folder, dtype
        self._tokenizer = folder.load_tokenizer()
        self._text_encoder = folder.load_text_encoder(_compute_dtype(dtype, device), device)
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    def batch(self, prompts: Sequence[str]) -> Tensor:
        """Embeddings [B, L, E], float32 on the CPU, zero after each prompt's end."""
        return _padded([self._encode(prompt) for prompt in prompts], self._folder.token_length)

    def negative(self, text: str = "") -> Tensor:
        """The embedding [1, L, E] of the negative prompt."""
        return self.batch([text])

    def truncated(self, prompts: Sequence[str]) -> int:
        """How many of the prompts have more tokens than L; counts the tokens of all of them."""
        return len(truncated_prompts(self._folder, self._tokenizer, prompts))

    def _encode(self, prompt: str) -> Tensor:
        if prompt not in self._kept:
            hidden, lengths = encode_prompts(self._folder, self._tokenizer, self._text_encoder, [prompt])
            self._kept[prompt] = _checked(hidden[0, : int(lengths[0])].to(self._dtype).cpu(), prompt)
            if len(self._kept) > _KEPT_PROMPTS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(prompt)
        return self._kept[prompt]


def embedding_ingredients(folder: WanFolder, dtype: torch.dtype) -> dict[str, Any]:
    """What a prompt's embedding depends on beside the prompt.

    Not on what it was computed in: a CPU's float32, rounded to the same dtype, is as good for a GPU.
    """
    return {
        "text_encoder": folder.fingerprint("text_encoder", "tokenizer"),
        "dtype": _name(dtype),
        "token_length": folder.token_length,
    }


def embedding_work(folder: WanFolder, prompts: Sequence[str], cache_dir: Path, dtype: torch.dtype) -> Work:
    """The embeddings of `prompts` and of the empty prompt as a cache to be filled; repeats are encoded once."""
    store = Store(cache_dir, "embeddings", embedding_ingredients(folder, dtype), ragged=["embedding"])

    def item_bytes(missing: list[str]) -> float:
        sample = missing[:: max(len(missing) // _ESTIMATE_SAMPLE, 1)]
        tokens = folder.load_tokenizer()(sample, truncation=True, max_length=folder.token_length).input_ids
        return sum(map(len, tokens)) / len(tokens) * folder.architecture.text_dim * dtype.itemsize

    batch_size = max(1, min(_MOST_PROMPTS, _BATCH_TOKENS // folder.token_length))
    return Work("prompt embeddings", store, ["", *prompts], batch_size, item_bytes)


def build_embeddings(work: Work, folder: WanFolder, dtype: torch.dtype, world: World) -> EmbeddingCache:
    """Encodes the prompts that are missing, each rank its part; the text encoder is loaded for that alone.

    Args:
        work: what `embedding_work` gave.
        folder: the teacher.
        dtype: of the text encoder and of the embeddings on disk.
        world: the ranks; each calls this.

    Raises:
        ConfigError: an embedding is not finite, or the disk is full (DoesNotFit).
    """
    device = world.device

    def begin() -> Compute:
        tokenizer = folder.load_tokenizer()
        text_encoder = folder.load_text_encoder(_compute_dtype(dtype, device), device)

        def compute(texts: list[str]) -> list[dict[str, Tensor]]:
            hidden, lengths = encode_prompts(folder, tokenizer, text_encoder, texts)
            hidden = hidden.to(dtype).cpu()
            truncated = set(truncated_prompts(folder, tokenizer, texts))
            return [
                {
                    "embedding": _checked(hidden[index, :length], text),
                    "truncated": torch.tensor(index in truncated),
                }
                for index, (text, length) in enumerate(zip(texts, lengths.tolist(), strict=True))
            ]

        return compute

    fill(work, world, begin)
    free_memory(device)
    return EmbeddingCache(work.store, folder.token_length)


def free_memory(device: torch.device) -> None:
    """Gives back what a model that is referred to no more has held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _padded(embeddings: Sequence[Tensor], token_length: int) -> Tensor:
    """[B, L, E] in float32 from embeddings [own length, E]."""
    padded = torch.zeros(len(embeddings), token_length, embeddings[0].shape[1])
    for row, embedding in zip(padded, embeddings, strict=True):
        row[: len(embedding)] = embedding
    return padded


def _checked(embedding: Tensor, prompt: str) -> Tensor:
    if not torch.isfinite(embedding).all():
        raise ConfigError(
            f"The embedding of the prompt {prompt[:80]!r} is not finite in {_name(embedding.dtype)}: "
            "take --teacher_dtype bfloat16 or float32, or drop the prompt."
        )
    return embedding


def _compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """A CPU without kernels for a half dtype computes in float32: emulated halves are many times slower."""
    return torch.float32 if device.type == "cpu" and not cpu_computes(dtype) else dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
