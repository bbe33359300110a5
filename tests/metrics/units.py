"""Values as Grafana writes them, by the units that the dashboards use."""

from __future__ import annotations

from collections.abc import Callable


def formatted(value: float, unit: str) -> str:
    """The value with its unit.

    Raises:
        KeyError: no dashboard has used this unit before.
    """
    return _FORMATS[unit](value)


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _bytes(value: float) -> str:
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1024**power:
            return f"{value / 1024**power:.3g} {name}"
    return f"{value:.0f} B"


def _seconds(value: float) -> str:
    for size, name in ((86400, "days"), (3600, "hours"), (60, "mins")):
        if abs(value) >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g} s" if abs(value) >= 1 or value == 0 else f"{value * 1000:.3g} ms"


_FORMATS: dict[str, Callable[[float], str]] = {
    "none": _short,
    "sci": lambda value: f"{value:.2e}",
    "percentunit": lambda value: f"{100 * value:.3g}%",
    "percent": lambda value: f"{value:.3g}%",
    "bytes": _bytes,
    "Bps": lambda value: f"{_bytes(value)}/s",
    "s": _seconds,
    "h": lambda value: f"{value:.3g} h",
}
