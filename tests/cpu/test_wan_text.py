"""Prompt embeddings against diffusers' WanPipeline.encode_prompt."""

from __future__ import annotations

import pytest
import torch

from wandistill.models.wan import open_teacher
from wandistill.models.wan_text import encode_prompts, truncated_prompts

PROMPTS = [
    "a large red circle left of a small blue square on a gray background",
    "",
    "  A  red\tcircle\n on a  gray   background ",
    "a red circle &amp; a &lt;blue&gt; square",
    "a &amp;amp; b",
    "a cafÃ© with â€œquotesâ€\x9d",
    "a cat",
    "unknown words: 猫 ☃",
    " ".join(["red"] * 600),
]


def pipeline_embeddings(folder, dtype):
    from diffusers import WanPipeline

    # The transformers and the VAE play no part in the encoding.
    pipeline = WanPipeline.from_pretrained(
        folder.path, dtype=dtype, transformer=None, transformer_2=None, vae=None, boundary_ratio=None
    )
    with torch.no_grad():
        return pipeline.encode_prompt(
            PROMPTS, do_classifier_free_guidance=False, max_sequence_length=folder.token_length
        )[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["t2v-14b", "embedded"])
def test_embeddings_are_the_pipelines_to_the_bit(tiny_wan, kind, dtype):
    folder = open_teacher("embedded" if kind == "embedded" else str(tiny_wan(kind)))
    embeddings, lengths = encode_prompts(
        folder, folder.load_tokenizer(), folder.load_text_encoder(dtype, "cpu"), PROMPTS
    )
    assert embeddings.dtype == dtype
    assert embeddings.shape == (len(PROMPTS), folder.token_length, folder.architecture.text_dim)
    assert torch.equal(embeddings, pipeline_embeddings(folder, dtype))
    for embedding, length in zip(embeddings, lengths.tolist(), strict=True):
        assert embedding[:length].abs().sum(dim=1).min() > 0
        assert not embedding[length:].any()


def test_lengths_count_the_end_mark(tiny_wan):
    folder = open_teacher(str(tiny_wan("t2v-14b")))
    _, lengths = encode_prompts(
        folder,
        folder.load_tokenizer(),
        folder.load_text_encoder(torch.float32, "cpu"),
        ["", "a red circle", PROMPTS[-1]],
    )
    assert lengths.tolist() == [1, 4, 512]


def test_a_prompt_is_encoded_the_same_alone_and_among_others(tiny_wan):
    folder = open_teacher(str(tiny_wan("t2v-14b")))
    tokenizer, text_encoder = folder.load_tokenizer(), folder.load_text_encoder(torch.float32, "cpu")
    together, _ = encode_prompts(folder, tokenizer, text_encoder, PROMPTS)
    alone, _ = encode_prompts(folder, tokenizer, text_encoder, PROMPTS[:1])
    torch.testing.assert_close(together[:1], alone, rtol=1e-5, atol=1e-6)


def test_prompts_longer_than_the_token_length_are_found(tiny_wan):
    real, embedded = open_teacher(str(tiny_wan("t2v-14b"))), open_teacher("embedded")
    assert truncated_prompts(real, real.load_tokenizer(), PROMPTS) == [8]
    fits, exceeds = " ".join(["red"] * 15), " ".join(["red"] * 16)
    assert truncated_prompts(embedded, embedded.load_tokenizer(), [fits, exceeds, "a"]) == [1]
