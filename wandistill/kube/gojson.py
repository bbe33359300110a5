"""JSON as Go's encoding/json writes it, so that a hash made here equals the one that Helm makes of the same values."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def to_json(value: Any) -> str:
    """`value` without blanks, keys sorted, numbers and texts as `toJson` in a template writes them."""
    if isinstance(value, Mapping):
        inner = ",".join(f"{_text(str(key))}:{to_json(value[key])}" for key in sorted(value, key=str))
        return "{" + inner + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(to_json(item) for item in value) + "]"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return _number(value)
    return json.dumps(value)


def digest(value: Any, length: int) -> str:
    """The first `length` hex digits of the SHA-256 of `value` as JSON."""
    return hashlib.sha256(to_json(value).encode()).hexdigest()[:length]


def _text(value: str) -> str:
    written = json.dumps(value, ensure_ascii=False)
    for character, escape in _ESCAPES.items():
        written = written.replace(character, escape)
    return written


def _number(value: float) -> str:
    """The shortest digits that give the number back; an exponent only where it is large."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is no number of JSON")
    if value == 0:
        return "-0" if math.copysign(1, value) < 0 else "0"
    if 1e-6 <= abs(value) < 1e21:
        written = format(Decimal(repr(value)), "f")
        return written.rstrip("0").rstrip(".") if "." in written else written
    mantissa, exponent = repr(value).split("e")
    mantissa = mantissa.removesuffix(".0")
    sign = "-" if exponent.startswith("-") else "+"
    digits = exponent.lstrip("+-").lstrip("0")
    return f"{mantissa}e{sign}{digits}"
