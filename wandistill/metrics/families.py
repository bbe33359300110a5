"""Rows of the table as the families of metrics that prometheus_client writes out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric as Family

from wandistill.metrics.names import BUCKETS, METRICS, Kind, Metric


class Families:
    """Collects samples by metric; what does not fit the table is refused, so no series is unbounded."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def add(self, name: str, labels: Mapping[str, str], value: Any) -> None:
        """A sample of metric `name`; `labels` are all of its labels, `value` a number, or for a histogram its
        `{"counts": [per bucket, the last one beyond all], "sum": seconds}`.

        Raises:
            KeyError, ValueError, TypeError, OverflowError: a name, label or value that the table does not have.
        """
        metric = METRICS[name]
        _check(metric, labels)
        samples = list(_samples(metric, {key: _text(labels[key]) for key in metric.label_names}, value))
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = Family(metric.family, metric.help, metric.kind.value, metric.unit)
        for suffix, own, number in samples:
            family.add_sample(suffix, own, number)

    def __iter__(self) -> Iterator[Family]:
        return iter(self._families.values())


def _check(metric: Metric, labels: Mapping[str, str]) -> None:
    if set(labels) != set(metric.label_names):
        raise ValueError(f"{metric.name} has the labels {metric.label_names}, not {tuple(labels)}")
    for name, values in metric.labels.items():
        if values and labels[name] not in values:
            raise ValueError(f"{metric.name}: {name} is one of {values}, not {labels[name]!r}")


def _text(value: object) -> str:
    """A label's value as both formats can write it: a path or name from the system may have bytes that are no text."""
    return str(value).encode("utf-8", "replace").decode()


def _samples(metric: Metric, labels: dict[str, str], value: Any) -> Iterable[tuple[str, dict[str, str], float]]:
    if metric.kind is Kind.HISTOGRAM:
        counts: Sequence[int] = value["counts"]
        if len(counts) != len(BUCKETS) + 1:
            raise ValueError(f"{metric.name} has {len(BUCKETS) + 1} buckets, not {len(counts)}")
        total = 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), counts, strict=True):
            total += int(count)
            yield f"{metric.name}_bucket", {**labels, "le": bound}, total
        yield f"{metric.name}_count", labels, total
        yield f"{metric.name}_sum", labels, float(value["sum"])
    else:
        yield metric.name, labels, float(value)
