"""Amounts of memory and durations as people write and read them."""

import pytest

from wandistill.errors import ConfigError
from wandistill.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("24GiB", 24 * 2**30), ("24 GB", 24 * 10**9), ("512Mi", 512 * 2**20), ("1.5 GiB", 3 * 2**29), ("7", 7), (7, 7)],
)
def test_amounts_are_parsed_with_binary_and_decimal_units(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["much", "-1GiB", "3 parsecs", ""])
def test_what_is_no_amount_is_named(text):
    with pytest.raises(ConfigError, match="amount of memory"):
        parse_bytes(text)


def test_amounts_and_durations_are_short():
    assert [format_bytes(n) for n in (17, 3 * 2**20, 28_576_983_168 * 2)] == ["17 B", "3.0 MiB", "53.2 GiB"]
    assert [format_seconds(s) for s in (0.0123, 4.25, 245, 12_000)] == ["12 ms", "4.2 s", "4 min 05 s", "3 h 20 min"]
