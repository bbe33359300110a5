"""Prompts to embeddings, as diffusers' WanPipeline does it.

Shape names: B batch, L tokens (the folder's token_length), E embedding size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wandistill.models.wan import WanFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, UMT5EncoderModel


@torch.no_grad()
def encode_prompts(
    folder: WanFolder,
    tokenizer: PreTrainedTokenizerBase,
    text_encoder: UMT5EncoderModel,
    prompts: Sequence[str],
) -> tuple[Tensor, Tensor]:
    """Embeddings [B, L, E] in the text encoder's dtype, zero after each prompt's end, and the lengths [B] (int64).

    The same bits as `WanPipeline.encode_prompt(prompts, max_sequence_length=folder.token_length)`. A length counts
    the prompt's tokens and its end mark `</s>`; a prompt that is longer than L is cut (see `truncated_prompts`).
    """
    tokens = tokenizer(
        clean_prompts(prompts),
        padding="max_length",
        max_length=folder.token_length,
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    device = text_encoder.device
    mask = tokens.attention_mask.to(device)
    hidden = text_encoder(tokens.input_ids.to(device), mask).last_hidden_state.to(text_encoder.dtype)
    # Not a product with the mask: what lies after the end may be infinite in float16.
    return hidden.masked_fill(~mask.bool().unsqueeze(-1), 0), mask.gt(0).sum(dim=1).long()


def clean_prompts(prompts: Sequence[str]) -> list[str]:
    """Prompts with repaired Unicode, HTML entities resolved and white space collapsed, by diffusers' own function."""
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    return [prompt_clean(prompt) for prompt in prompts]


def truncated_prompts(folder: WanFolder, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[int]:
    """Indices of the prompts that have more tokens (end mark included) than the teacher's token length."""
    ids = tokenizer(clean_prompts(prompts), add_special_tokens=True, truncation=False, verbose=False).input_ids
    return [index for index, tokens in enumerate(ids) if len(tokens) > folder.token_length]
