"""What `--student_config` says: the student's shape, the teacher blocks it starts from, and their expert. No torch.

The keys of a config are in `wandistill.student_keys`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wandistill.architecture import WanArchitecture
from wandistill.errors import ConfigError
from wandistill.student_keys import KNOWN_KEYS, KeyReader, proportional_ffn, spaced_blocks

NAMES = ("half", "quarter", "1b")
INITS = ("low", "average", "high", "auto", "random")

_BILLION = 10**9


@dataclass(frozen=True)
class StudentSpec:
    """A student as it will be built from its teacher."""

    name: str
    architecture: WanArchitecture
    blocks: tuple[int, ...]  # teacher block of each student block
    init: str | None = None  # None: left to --init
    image_size: int | None = None  # pixels of a side, a default for --resolution
    notes: tuple[str, ...] = ()

    def default_resolution(self, *, embedded: bool) -> str:
        """`--resolution` where none is given; `embedded`: with the embedded teacher."""
        size = self.image_size
        return f"{size}x{size}" if size else ("64x64" if embedded else "832x480")

    @property
    def heads(self) -> int:
        """Attention heads of each block."""
        return self.architecture.num_attention_heads

    def narrower_than(self, teacher: WanArchitecture) -> bool:
        """Whether width shrinks too, so that heads and channels have to be chosen."""
        own = self.architecture
        return own.hidden_size != teacher.hidden_size or own.ffn_dim != teacher.ffn_dim

    def to_config(self) -> dict[str, Any]:
        """A student config that gives this student again."""
        own = self.architecture
        config: dict[str, Any] = {
            "name": self.name,
            "num_layers": own.num_layers,
            "blocks": list(self.blocks),
            "num_attention_heads": own.num_attention_heads,
            "attention_head_dim": own.attention_head_dim,
            "ffn_dim": own.ffn_dim,
        }
        optional = {"init": self.init, "image_size": self.image_size}
        return config | {key: value for key, value in optional.items() if value is not None}


def student_spec(value: str | Mapping[str, Any], teacher: WanArchitecture) -> StudentSpec:
    """The student that `value` names or describes.

    Args:
        value: half, quarter or 1b; the path of a JSON or YAML file; or the mapping in such a file.
        teacher: the architecture of the teacher's experts.

    Raises:
        ConfigError: no such name or file, an unknown key, or a student that cannot be cut from this teacher.
    """
    if isinstance(value, Mapping):
        return _from_mapping(value, teacher, "student config")
    if value in NAMES:
        architecture = _named(value, teacher)
        return StudentSpec(value, architecture, spaced_blocks(architecture.num_layers, teacher.num_layers))
    return _from_mapping(_read(value), teacher, f"--student_config {value}")


def _named(name: str, teacher: WanArchitecture) -> WanArchitecture:
    fractions = {"half": 2, "quarter": 4}
    if name in fractions:
        return replace(teacher, num_layers=max(1, teacher.num_layers // fractions[name]))
    if teacher.parameters <= _BILLION:
        sizes = ", ".join(f"{key} ({_named(key, teacher).parameters / 1e6:.1f} M)" for key in fractions)
        raise ConfigError(
            f"--student_config 1b: is a student of about a billion parameters, but the teacher has "
            f"{teacher.parameters / 1e6:.1f} M; choose {sizes} or a file."
        )
    return _billion(teacher)


def _billion(teacher: WanArchitecture) -> WanArchitecture:
    """The student nearest to a billion parameters.

    Full width where at least half of the blocks remain then, because whole blocks are copied as they are; else depth
    and width shrink alike.
    """

    def distance(architecture: WanArchitecture) -> float:
        return abs(architecture.parameters / _BILLION - 1)

    deep = [replace(teacher, num_layers=layers) for layers in range(1, teacher.num_layers + 1)]
    full_width = min(deep, key=distance)
    if 2 * full_width.num_layers >= teacher.num_layers:
        return full_width

    def rank(architecture: WanArchitecture) -> tuple[bool, float, float]:
        kept_heads = architecture.num_attention_heads / teacher.num_attention_heads
        kept_layers = architecture.num_layers / teacher.num_layers
        return distance(architecture) > 0.02, -min(kept_heads, kept_layers), distance(architecture)

    narrow = [
        replace(candidate, num_attention_heads=heads, ffn_dim=proportional_ffn(heads, teacher))
        for candidate in deep
        for heads in range(1, teacher.num_attention_heads + 1)
    ]
    return min(narrow, key=rank)


def _read(value: str) -> Mapping[str, Any]:
    import yaml

    path = Path(value)
    if not path.is_file():
        raise ConfigError(
            f"--student_config {value}: is neither a file nor one of the names {', '.join(NAMES)}; "
            "give a name or the path of a JSON or YAML file."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--student_config {value}: cannot be read as JSON or YAML: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"--student_config {value}: holds a {type(content).__name__}, but must map keys such as num_layers "
            "to values."
        )
    return content


def _from_mapping(config: Mapping[str, Any], teacher: WanArchitecture, source: str) -> StudentSpec:
    for key in config:
        if key not in KNOWN_KEYS:
            close = difflib.get_close_matches(str(key), KNOWN_KEYS, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise ConfigError(f"{source}: '{key}' is not a key; known are {', '.join(KNOWN_KEYS)}.{hint}")
    reader = KeyReader(config, teacher, source)
    layers, blocks = reader.layers_and_blocks()
    heads = reader.heads()
    architecture = replace(
        teacher, num_layers=layers, num_attention_heads=heads, ffn_dim=reader.ffn(heads * teacher.attention_head_dim)
    )
    reader.check_teachers()
    init = config.get("init")
    if init is not None and init not in INITS:
        raise ConfigError(f"{source}: init '{init}' is not one of {', '.join(INITS)}.")
    name = str(config.get("name") or f"{layers} of {teacher.num_layers} blocks, {heads} heads")
    return StudentSpec(name, architecture, blocks, init, reader.integer("image_size"), tuple(reader.notes))
