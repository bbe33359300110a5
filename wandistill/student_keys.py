"""The keys of a student config, read and checked against the teacher. No torch.

Keys of a student config (JSON or YAML), all optional; what is missing is the teacher's:

| key | meaning |
|---|---|
| `name` | a label for reports |
| `num_layers` | blocks; evenly spaced teacher blocks, both ends kept, unless `blocks` says which |
| `blocks` | the teacher's block that each student block starts from, increasing, counted from 0 |
| `num_attention_heads` | heads; hidden size = heads x head size, Wan has no other width |
| `attention_head_dim` | head size; only the teacher's, since whole heads are kept |
| `ffn_dim` | feed-forward channels; missing with fewer heads: in proportion, a multiple of the head size |
| `init` | low, average, high, auto or random; wins over `--init` |
| `in_channels`, `out_channels`, `text_dim`, `freq_dim`, `patch_size`, `cross_attn_norm` | only the teacher's |

Keys of Wan-Lite, the seed project's student, are mapped: `depth` is `num_layers`; `hidden_size` (or `hidden_dim`) is
heads x head size; `num_heads` is `num_attention_heads`, and beside a `hidden_size`, which decides, only remarked on;
`mlp_ratio` is `ffn_dim` / hidden size; `image_size` is the default of `--resolution`. What describes the seed's own
autoencoder and text encoder (`WAN_LITE_FIXED`) changes nothing here, because the student shares the teacher's; a note
says so where the value differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from wandistill.architecture import WanArchitecture
from wandistill.errors import ConfigError

_OWN_KEYS = ("name", "num_layers", "blocks", "num_attention_heads", "ffn_dim", "init")
_TEACHERS_KEYS = ("attention_head_dim", "in_channels", "out_channels", "text_dim", "freq_dim", "cross_attn_norm")
_WAN_LITE_KEYS = ("hidden_size", "hidden_dim", "depth", "num_heads", "mlp_ratio", "image_size")
# Wan-Lite key -> the field of the architecture that it describes, or "" where Wan has no such number.
WAN_LITE_FIXED = {
    "model_type": "",
    "num_channels": "in_channels",
    "image_channels": "",
    "text_encoder_output_dim": "text_dim",
    "text_encoder_dim": "text_dim",
    "text_max_length": "",
    "max_text_length": "",
    "projection_factor": "",
}
KNOWN_KEYS = (*_OWN_KEYS, *_TEACHERS_KEYS, "patch_size", *_WAN_LITE_KEYS, *WAN_LITE_FIXED)


def spaced_blocks(count: int, teacher_count: int) -> tuple[int, ...]:
    """`count` of `teacher_count` block indices, evenly spaced, first and last kept (rounded half up)."""
    if count == 1:
        return (0,)
    gaps = count - 1
    return tuple((2 * index * (teacher_count - 1) + gaps) // (2 * gaps) for index in range(count))


def proportional_ffn(heads: int, teacher: WanArchitecture) -> int:
    """Feed-forward channels of a student with `heads` heads: the teacher's share, a multiple of the head size."""
    if heads == teacher.num_attention_heads:
        return teacher.ffn_dim
    unit = teacher.attention_head_dim
    share = teacher.ffn_dim * heads / teacher.num_attention_heads
    return min(teacher.ffn_dim, max(1, round(share / unit)) * unit)


class KeyReader:
    """Reads and checks the values of one student config; `notes` collects what was not taken."""

    def __init__(self, config: Mapping[str, Any], teacher: WanArchitecture, source: str) -> None:
        self.config, self.teacher, self.source = config, teacher, source
        self.notes: list[str] = []

    def error(self, text: str) -> ConfigError:
        """The error that says `text` of this config."""
        return ConfigError(f"{self.source}: {text}")

    def integer(self, *keys: str) -> int | None:
        """The whole number that `keys`, names of one thing, agree on; None if none is there."""
        given = {key: self.config[key] for key in keys if self.config.get(key) is not None}
        for key, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise self.error(f"{key} {value!r} must be a whole number of at least 1.")
        if len(set(given.values())) > 1:
            both = " and ".join(f"{key} {value}" for key, value in given.items())
            raise self.error(f"{both} are the same thing and contradict each other: keep one.")
        return next(iter(given.values()), None)

    def layers_and_blocks(self) -> tuple[int, tuple[int, ...]]:
        """Number of blocks, and the teacher block of each."""
        count, available = self.integer("num_layers", "depth"), self.teacher.num_layers
        blocks = self.config.get("blocks")
        if blocks is None:
            count = available if count is None else count
            if count > available:
                raise self.error(
                    f"num_layers {count} is more than the teacher's {available} blocks: a student cannot be deeper."
                )
            return count, spaced_blocks(count, available)
        whole = isinstance(blocks, list | tuple) and all(isinstance(b, int) and not isinstance(b, bool) for b in blocks)
        if not whole or not blocks:
            raise self.error(f"blocks {blocks!r} must be a list of block indices, such as [0, 2, 4, 6].")
        if min(blocks) < 0 or max(blocks) >= available:
            raise self.error(f"blocks {list(blocks)}: the teacher's {available} blocks are 0 to {available - 1}.")
        if any(later <= earlier for earlier, later in pairwise(blocks)):
            raise self.error(f"blocks {list(blocks)} must increase, each teacher block at most once.")
        if count is not None and count != len(blocks):
            raise self.error(
                f"num_layers {count} contradicts blocks {list(blocks)}, which are {len(blocks)}: keep one."
            )
        return len(blocks), tuple(blocks)

    def heads(self) -> int:
        """Number of attention heads."""
        available, size = self.teacher.num_attention_heads, self.teacher.attention_head_dim
        hidden = self.integer("hidden_size", "hidden_dim")
        heads = self.integer("num_attention_heads")
        lite_heads = self.integer("num_heads")
        if hidden is not None:
            if hidden % size:
                raise self.error(
                    f"hidden_size {hidden} is not a whole number of heads of {size} channels, the teacher's head size; "
                    f"the nearest is {max(1, round(hidden / size)) * size}."
                )
            if heads is not None and heads * size != hidden:
                raise self.error(
                    f"hidden_size {hidden} contradicts num_attention_heads {heads}, which is {heads * size}: keep one."
                )
            heads = hidden // size
            if lite_heads is not None and lite_heads != heads:
                self.notes.append(
                    f"num_heads {lite_heads} is not taken: hidden_size {hidden} is {heads} heads of {size} channels, "
                    "the teacher's head size."
                )
        elif lite_heads is not None:
            heads = self.integer("num_attention_heads", "num_heads")
        if heads is None:
            return available
        if heads > available:
            raise self.error(
                f"{heads} heads (hidden size {heads * size}) are more than the teacher's {available} "
                f"(hidden size {available * size}): a student cannot be wider."
            )
        return heads

    def ffn(self, hidden: int) -> int:
        """Feed-forward channels of a student with `hidden` residual channels."""
        available, ffn = self.teacher.ffn_dim, self.integer("ffn_dim")
        ratio = self.config.get("mlp_ratio")
        if ratio is not None:
            if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not ratio > 0:
                raise self.error(f"mlp_ratio {ratio!r} must be a number above 0.")
            if ffn is not None and ffn != round(ratio * hidden):
                raise self.error(
                    f"mlp_ratio {ratio} (of hidden size {hidden}: {round(ratio * hidden)}) contradicts ffn_dim {ffn}: "
                    "keep one."
                )
            ffn = max(1, round(ratio * hidden))
        if ffn is None:
            return proportional_ffn(hidden // self.teacher.attention_head_dim, self.teacher)
        if ffn > available:
            raise self.error(f"ffn_dim {ffn} is more than the teacher's {available}: a student cannot be wider.")
        return ffn

    def check_teachers(self) -> None:
        """Refuses what contradicts the teacher, and notes Wan-Lite's keys that describe another autoencoder."""
        for key in _TEACHERS_KEYS:
            own = getattr(self.teacher, key)
            if self.config.get(key, own) != own:
                raise self.error(
                    f"{key} {self.config[key]!r} differs from the teacher's {own}, which the student shares."
                )
        patch, own_patch = self.config.get("patch_size"), self.teacher.patch_size
        if not isinstance(patch, int | None) and tuple(patch) != own_patch:
            raise self.error(f"patch_size {patch} differs from the teacher's {list(own_patch)}.")
        unused = [
            f"{key} {self.config[key]}"
            for key, field in WAN_LITE_FIXED.items()
            if key in self.config and (not field or self.config[key] != getattr(self.teacher, field))
        ]
        if isinstance(patch, int) and patch != own_patch[-1]:
            unused.append(f"patch_size {patch}")
        if unused:
            self.notes.append(
                f"{', '.join(unused)}: not taken, because the student shares the teacher's autoencoder, text encoder "
                f"and patches ({self.teacher.in_channels} latent channels, text embeddings of {self.teacher.text_dim})."
            )
