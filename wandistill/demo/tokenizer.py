"""The embedded teacher's word-level tokenizer: 26 words, one token each, and `</s>` at the end."""

from typing import Any

from wandistill.demo.captions import BACKGROUNDS, COLORS, SHAPES, SIZES

PAD_ID, END_ID = 0, 1
WORDS = (
    *("<pad>", "</s>", "<unk>", "a", "on", "background"),
    *SHAPES,
    *COLORS,
    *BACKGROUNDS,
    *("left", "right", "above", "below", "of"),
    *SIZES,
)
TOKEN_LENGTH = 16
"""Tokens per prompt. Wan doesn't mask the zero padding of its prompt embeddings, so the length is part of what the
model learns: with 226 tokens the accuracy of a teacher trained on 16 fell to 36 %."""


def token_ids(caption: str) -> list[int]:
    """The TOKEN_LENGTH token ids of a caption, padded with PAD_ID; the same as the shipped tokenizer's."""
    ids = [WORDS.index(word) for word in caption.split()] + [END_ID]
    return ids + [PAD_ID] * (TOKEN_LENGTH - len(ids))


def build_tokenizer() -> Any:
    """The same as a transformers tokenizer, to be saved with the teacher."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END_ID)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=TOKEN_LENGTH,
    )
