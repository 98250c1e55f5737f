# SPDX-License-Identifier: Apache-2.0
"""Tables from which a service draws: each backend has its share, equal on every node."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.entries.services import Choice, Table
from ebpflb.model.annotations import MAGLEV, RANDOM, ROUND_ROBIN
from ebpflb.model.endpoints import finished
from ebpflb.plan import tables
from ebpflb.plan.tables import ALWAYS, Weighted

weights = some.lists(some.integers(1, 1000), min_size=1, max_size=30)


def backends(*weights: int, first: int = 1) -> list[Weighted]:
    return [
        Weighted(slot, f"10.1.0.{first + slot}:8080", weight) for slot, weight in enumerate(weights)
    ]


def places(scheduler: str, found: list[Weighted], count: int) -> list[Choice]:
    made = finished(tables.making(scheduler, found, count))
    return [place for _, place in Table(0, made).rows()]


def shares(scheduler: str, found: list[Weighted], count: int) -> dict[int, float]:
    """Return the share of all draws for each slot, from 0 to 1."""
    got: Counter[int] = Counter()
    for place in places(scheduler, found, count):
        below = 2**32 if place.below == ALWAYS else place.below
        got.update({place.slot: below})
        got.update({place.other: 2**32 - below})
    return {slot: got[slot] / (count << 32) for slot in got if got[slot]}


@given(weights)
def test_a_round_has_each_backend_as_often_as_its_weight_says(its: list[int]) -> None:
    """In a round each backend has its share of turns, but at least one."""
    found = backends(*its)
    size = tables.size(ROUND_ROBIN, [its]) or len(its)
    turns = Counter(place.slot for place in places(ROUND_ROBIN, found, size))
    rare = sum(weight * size < sum(its) for weight in its)
    assert turns.keys() == set(range(len(its)))
    assert all(abs(turns[at] - w * size / sum(its)) < 1 + rare for at, w in enumerate(its))


def test_a_round_is_bounded() -> None:
    """The size of a round is bounded: one Service cannot use the whole map."""
    many = [99, 100] * 2500
    assert tables.size(ROUND_ROBIN, [many]) <= max(tables.PRIMES)
    assert tables.size(ROUND_ROBIN, [[1, 1000]]) <= 2 * tables.PLACES


def test_maglev_bounds_the_ratio_of_weights() -> None:
    """Each weight counts as at least a hundredth of the largest, so that no table takes seconds to
    make.
    """
    size = tables.PRIMES[-1]
    got = shares(MAGLEV, backends(1000, *[1] * 600), size)
    assert got[0] == pytest.approx(100 / 700, abs=0.01)
    assert all(got[at] == pytest.approx(1 / 700, rel=0.2) for at in range(1, 601))


def test_a_round_is_spread_evenly() -> None:
    """An endpoint with a third of the turns never comes twice in a row."""
    found = backends(1, 2, 3)
    order = [place.slot for place in places(ROUND_ROBIN, found, 6)]
    assert Counter(order) == {0: 1, 1: 2, 2: 3}
    assert all(a != b for a, b in pairwise(order))


@pytest.mark.parametrize("count", [1, 2, 10, 100, 655])
def test_maglev_is_even(count: int) -> None:
    """The size is a prime of at least 100 places per backend, so no backend has 2 % more than
    another.
    """
    found = backends(*[100] * count)
    size = tables.size(MAGLEV, [[100] * count])
    assert size >= 100 * count or size == tables.PRIMES[-1]
    got = Counter(place.slot for place in places(MAGLEV, found, size))
    assert len(got) == count
    assert max(got.values()) - min(got.values()) <= 1


@given(some.permutations(range(8)))
def test_every_node_has_the_same_table(order: list[int]) -> None:
    """Every node has the same table, whatever slots the backends have there."""
    found = backends(*[100] * 8)
    moved = [Weighted(slot, found[at].name, 100) for slot, at in enumerate(order)]
    names = [[each.name for each in its] for its in (found, moved)]
    one, other = (
        [name[place.slot] for place in places(MAGLEV, its, 1021)]
        for its, name in zip((found, moved), names, strict=True)
    )
    assert one == other


@pytest.mark.parametrize("count", [5, 20, 50])
def test_a_change_of_maglev_moves_little_else(count: int) -> None:
    """If one of N backends is removed (section 5.3 of the paper), its places move, and at most 1 in
    12 of the other places. The table's size stays the same.
    """
    before = backends(*[100] * count)
    gone = before[count // 2]
    after = [each for each in before if each is not gone]
    size = tables.size(MAGLEV, [[100] * count])
    pairs = [
        (one.slot, other.slot)
        for one, other in zip(
            places(MAGLEV, before, size), places(MAGLEV, after, size), strict=True
        )
    ]
    stay = [(one, other) for one, other in pairs if one != gone.slot]
    moved = sum(one != other for one, other in stay)
    assert moved <= len(stay) / 12


@pytest.mark.parametrize("scheduler", [MAGLEV, ROUND_ROBIN])
def test_a_large_table_is_made_in_steps(scheduler: str) -> None:
    """A large table is made in steps, so that other work does not wait for all of it."""
    making = tables.making(scheduler, backends(*range(1, 701)), tables.PRIMES[-1])
    steps = sum(1 for _ in making)
    assert steps >= tables.PRIMES[-1] // tables.PLACES_A_STEP - 1


@given(weights)
def test_random_draws_by_weight(its: list[int]) -> None:
    """The random scheduler draws by weight, within the precision of 32 bits."""
    found = shares(RANDOM, backends(*its), len(its))
    assert found == pytest.approx({at: w / sum(its) for at, w in enumerate(its)}, abs=1e-8)
