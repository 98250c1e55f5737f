# SPDX-License-Identifier: Apache-2.0
"""How many connections leave each endpoint, and how many at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpflb.plan.rebalance import LONGEST, Movement, excess

EVEN = dict.fromkeys((1, 2, 3), 100)


@pytest.mark.parametrize(
    "counts, weights, beyond",
    [
        ({1: 30, 2: 30}, EVEN, {1: 10, 2: 10}),
        ({1: 24, 2: 18, 3: 18}, EVEN, {}),  # a share of 20, and a fifth beyond it
        ({1: 25, 2: 17, 3: 18}, EVEN, {1: 5}),
        ({1: 2, 2: 0, 3: 0}, EVEN, {}),  # fewer connections than endpoints
        ({1: 2, 2: 1, 3: 0}, EVEN, {1: 1}),
        ({1: 90}, {1: 100}, {}),  # the only endpoint
        ({1: 90, 9: 900}, {1: 100}, {}),  # the others get no new connections
        ({1: 40, 2: 20}, {1: 200, 2: 100}, {}),
        ({1: 30, 2: 30}, {1: 200, 2: 100}, {2: 10}),
        ({}, {}, {}),
    ],
)
def test_what_is_beyond_an_endpoints_share(
    counts: dict[int, int], weights: dict[int, int], beyond: dict[int, int]
) -> None:
    assert excess(counts, weights, 0.2) == beyond


@given(
    counts=st.dictionaries(st.integers(1, 20), st.integers(0, 500)),
    weights=st.dictionaries(st.integers(1, 20), st.integers(1, 1000)),
    above=st.floats(0.01, 9),
)
def test_no_endpoint_falls_below_its_share(
    counts: dict[int, int], weights: dict[int, int], above: float
) -> None:
    """Also if all that is beyond its share leaves it; so it never loses its last connection."""
    total = sum(counts.get(id, 0) for id in weights)
    for id, beyond in excess(counts, weights, above).items():
        assert 0 < beyond < counts[id]
        assert counts[id] - beyond >= total * weights[id] / sum(weights.values())


def moving(*, counts: dict[int, int] | None = None) -> Movement:
    """Return a movement that a second endpoint began."""
    made = Movement(is_new=False)
    assert not made.look({1}, 0.0)
    assert made.look({1, 2}, 0.0)
    if counts:
        made.most(excess(counts, {1: 1, 2: 1}, 0.2), counts)
    return made


def test_only_a_new_endpoint_begins_a_movement() -> None:
    """None begins when the agent starts, or when endpoints go."""
    made = Movement(is_new=False)
    assert not made.look({1, 2}, 0.0)
    assert not made.look({1}, 1.0)
    assert made.look({1, 2}, 2.0)
    assert made.look({1, 2}, 2.0 + LONGEST - 1)
    assert not made.look({1, 2}, 2.0 + LONGEST)
    assert made.look({2, 3}, 4.0 + LONGEST)


def test_a_service_that_asks_for_it_now_begins_at_once() -> None:
    assert Movement(is_new=True).look({1, 2}, 0.0)


@pytest.mark.parametrize("total, most", [(10, 1), (100, 2), (1000, 20)])
def test_it_is_slow(total: int, most: int) -> None:
    counts = {1: total, 2: 0}
    assert moving().most(excess(counts, {1: 1, 2: 1}, 0.2), counts) == most


def test_it_ends_no_more_than_were_open() -> None:
    """Else connections that come back to the same endpoint would move for ever."""
    counts = {1: 3, 2: 0}
    made = moving(counts=counts)
    made.ended(2)
    assert made.look({1, 2}, 1.0)
    assert made.most({1: 2}, counts) == 1
    made.ended(1)
    assert not made.look({1, 2}, 2.0)


def test_a_movement_that_was_stopped_waits_for_another_endpoint() -> None:
    made = moving(counts={1: 100, 2: 0})
    made.stop()
    assert not made.look({1, 2}, 1.0)
    assert made.look({1, 2, 3}, 2.0)
