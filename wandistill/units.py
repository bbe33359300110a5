"""Bytes and durations: parse what people write, format what they read."""

from __future__ import annotations

import re

from wandistill.errors import ConfigError

_FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    # Kubernetes quantities.
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
_QUANTITY = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")

GIB = 2**30
MIB = 2**20


def parse_bytes(text: str | int) -> int:
    """Bytes of a quantity such as `24GiB`, `24 GB`, `512Mi` or `1073741824`.

    Raises:
        ConfigError: the text is not a number with one of the known units.
    """
    if isinstance(text, int):
        return text
    match = _QUANTITY.match(text)
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"'{text}' is not an amount of memory: write a number and a unit, such as 24GiB, 24GB or 512Mi."
        )
    return int(float(match.group(1)) * factor)


def format_bytes(count: int | float) -> str:
    """`count` bytes as a short text with a binary unit, such as `26.6 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """A duration in seconds as `850 ms`, `12.3 s`, `4 min 05 s` or `3 h 20 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
