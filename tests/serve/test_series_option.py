# SPDX-License-Identifier: Apache-2.0
"""How many service ports have series of their own, and which: the option."""

import pytest

from ebpflb.options import MOST_SERIES, parse_series, show_series


@pytest.mark.parametrize(
    ("text", "limit", "keys"),
    [
        ("50", 50, []),
        (f"{MOST_SERIES}", MOST_SERIES, []),
        ("7,tier=web", 7, ["tier"]),
        ("7,stage in (test,canary),!old", 7, ["stage", "old"]),
        ("7,", 7, []),
    ],
)
def test_series(text: str, limit: int, keys: list[str]) -> None:
    """A number alone means all Services; what follows it is a selector, which may have commas."""
    series = parse_series(text)
    assert series is not None
    assert (series.limit, [each.key for each in series.selector]) == (limit, keys)
    assert parse_series(show_series(series)) == series


def test_none_are_wanted() -> None:
    """0 is the default, and the same as no option."""
    assert parse_series("0") is None
    assert parse_series(show_series(None)) is None


@pytest.mark.parametrize("text", ["", "-1", "1001", "99999999999", "tier=web", "5,a b", "٣", "1.5"])
def test_wrong_series(text: str) -> None:
    with pytest.raises(ValueError, match=r"number|selector"):
        parse_series(text)
