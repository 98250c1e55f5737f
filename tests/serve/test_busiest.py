# SPDX-License-Identifier: Apache-2.0
"""Which service ports have their own series."""

import random

import pytest

from ebpflb.model.services import Protocol
from ebpflb.options import MOST_SERIES, parse_series, show_series
from ebpflb.serve.metrics import Busiest, Port


def port(name: str) -> Port:
    return Port("shop", name, "http", Protocol.TCP)


def totals(**counts: int) -> dict[Port, int]:
    return {port(name): count for name, count in counts.items()}


def chosen(busiest: Busiest, **counts: int) -> set[str]:
    busiest.choose(totals(**counts))
    return {it.service for it in busiest.ports}


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
def test_the_option_has_a_number_and_a_selector(text: str, limit: int, keys: list[str]) -> None:
    """A number alone means all Services; the text after it is a selector, which may have commas."""
    series = parse_series(text)
    assert series is not None
    assert (series.limit, [each.key for each in series.selector]) == (limit, keys)
    assert parse_series(show_series(series)) == series


def test_none_are_wanted() -> None:
    """0 is the default, and means the same as no option."""
    assert parse_series("0") is None
    assert parse_series(show_series(None)) is None


@pytest.mark.parametrize("text", ["", "-1", "1001", "99999999999", "tier=web", "5,a b", "٣", "1.5"])
def test_wrong_series(text: str) -> None:
    with pytest.raises(ValueError, match=r"number|selector"):
        parse_series(text)


def test_the_busiest_are_chosen() -> None:
    """The first choice uses all counts so far; equal Services are chosen by name."""
    assert chosen(Busiest(2), a=5, b=9, c=7) == {"b", "c"}
    assert chosen(Busiest(2), a=5, b=5, c=5) == {"a", "b"}
    assert chosen(Busiest(9), a=5, b=0) == {"a", "b"}


def test_recent_connections_count() -> None:
    """A Service that was busy makes room within minutes for one that is busy now; counts from
    before the first choice make room at once.
    """
    busiest, old = Busiest(1), 1_000_000_000
    assert chosen(busiest, old=old, new=0) == {"old"}
    assert chosen(busiest, old=old, new=100) == {"new"}
    assert chosen(busiest, old=old + 10_000, new=200) == {"old"}
    rounds = [chosen(busiest, old=old + 10_000, new=200 + 100 * n) for n in range(1, 20)]
    assert rounds[0] == {"old"} and rounds[-1] == {"new"}


def test_series_do_not_come_and_go() -> None:
    """Of two Services that are about equally busy, with noise, the first one stays."""
    draw = random.Random(1)
    busiest, a, b = Busiest(1), 1000, 999
    assert chosen(busiest, a=a, b=b) == {"a"}
    for _ in range(200):
        a, b = a + draw.randint(80, 120), b + draw.randint(80, 120)
        assert chosen(busiest, a=a, b=b) == {"a"}


def test_a_deleted_service_is_forgotten() -> None:
    """A deleted Service's place is free at once; a new one with its name begins at zero, so its
    total counts.
    """
    busiest = Busiest(1)
    assert chosen(busiest, a=1_000_000, b=1) == {"a"}
    assert chosen(busiest, b=2) == {"b"}
    assert chosen(busiest, a=1, b=3) == {"b"}
    assert chosen(busiest, a=50, b=3) == {"a"}
    assert chosen(busiest, a=10, b=3) == {"a"}  # recreated: 10 new ones
