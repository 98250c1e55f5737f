# SPDX-License-Identifier: Apache-2.0
"""Ids, ranges of slots, and the quarantine between two owners."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from ebpflb.plan.entries import Range
from ebpflb.plan.numbers import QUARANTINE_SECONDS, Full, Ids, Quarantine, Ranges

SLOTS = 24


def test_ids_start_at_one() -> None:
    """Zero is no id, so that an element nobody has written names nothing."""
    assert [Ids(4).take(), Ids(2).take()] == [1, 1]


def test_freed_id_comes_back_last() -> None:
    """A number is given again only after all others."""
    ids = Ids(5)
    assert [ids.take(), ids.take()] == [1, 2]
    ids.give_back(1)
    assert [ids.take(), ids.take(), ids.take()] == [3, 4, 1]


def test_ids_capacity() -> None:
    """Ids below the capacity are given, and then there is no more."""
    ids = Ids(3)
    assert (ids.free, ids.take(), ids.take(), ids.free) == (2, 1, 2, 0)
    with pytest.raises(Full):
        ids.take()


def test_adopted_id() -> None:
    """An id that the maps hold is never given, and the round goes on behind it."""
    ids = Ids(6)
    ids.adopt(3)
    ids.adopt(1)
    assert [ids.take(), ids.take(), ids.take()] == [4, 5, 2]


@given(some.lists(some.integers(0, 5)))
@settings(max_examples=60, deadline=None)
def test_ids_are_unique(moves: list[int]) -> None:
    """No id is given to two owners, whatever comes back in between."""
    ids, taken = Ids(5), list[int]()
    for move in moves:
        if move < len(taken):
            ids.give_back(taken.pop(move))
        elif ids.free:
            taken.append(ids.take())
        assert len(set(taken)) == len(taken) == ids.capacity - 1 - ids.free


def test_ranges_first_fit() -> None:
    """The first hole that is large enough is used."""
    ranges = Ranges(10)
    first, _, third = ranges.take(2), ranges.take(1), ranges.take(3)
    ranges.give_back(first)
    ranges.give_back(third)
    assert [ranges.take(3), ranges.take(2)] == [Range(3, 3), Range(0, 2)]


def test_empty_range() -> None:
    """Nothing is taken for a service without backends, not even from a full map."""
    ranges = Ranges(0)
    assert ranges.take(0) == Range(0, 0)
    ranges.give_back(Range(0, 0))
    assert ranges.holes == [Range(0, 0)] and not ranges.free


def test_no_run_of_that_size() -> None:
    """Enough slots in pieces are not enough."""
    ranges = Ranges(3)
    taken = [ranges.take(1) for _ in range(3)]
    ranges.give_back(taken[0])
    ranges.give_back(taken[2])
    with pytest.raises(Full, match="map slots has no 2 free slots in a row"):
        ranges.take(2)


_sizes = some.integers(1, 6)
_indexes = some.integers(0, SLOTS - 1)


def check_holes(ranges: Ranges, used: set[int]) -> None:
    """Disjoint, sorted, joined, and together with ``used`` everything."""
    holes = ranges.holes
    assert all(sum(one) < other.base for one, other in pairwise(holes))
    free = [slot for hole in holes for slot in range(hole.base, sum(hole))]
    assert sorted([*free, *used]) == list(range(SLOTS))
    assert ranges.free == len(free)


@given(some.lists(some.tuples(some.booleans(), _sizes, _indexes), max_size=40))
@settings(max_examples=150, deadline=None)
def test_holes(moves: list[tuple[bool, int, int]]) -> None:
    """Any taking and giving back keeps the holes disjoint, sorted, joined and complete."""
    ranges, taken = Ranges(SLOTS), list[Range]()
    for giving, size, index in moves:
        if giving and taken:
            ranges.give_back(taken.pop(index % len(taken)))
        elif any(hole.size >= size for hole in ranges.holes):
            taken.append(ranges.take(size))
        check_holes(ranges, {slot for run in taken for slot in range(run.base, sum(run))})


@given(some.lists(some.builds(Range, _indexes, some.integers(0, 6)), max_size=8))
@settings(max_examples=100, deadline=None)
def test_adopted_ranges(adopted: list[Range]) -> None:
    """Ranges that the maps refer to are used up, even where they overlap."""
    ranges, used = Ranges(SLOTS), set[int]()
    for run in adopted:
        ranges.adopt(run)
        used |= set(range(run.base, min(sum(run), SLOTS)))
    holes = {slot for hole in ranges.holes for slot in range(hole.base, sum(hole))}
    assert holes == set(range(SLOTS)) - used


def test_nothing_rests_before_it_is_carried_out() -> None:
    """What a plan frees stays away for as long as the plan is not carried out."""
    quarantine, back = Quarantine(), list[str]()
    quarantine.add(lambda: back.append("slot"))
    quarantine.release(1000.0)
    assert (len(quarantine), back) == (1, [])


def test_rests_a_second() -> None:
    """What was freed comes back a second after that was carried out, and only once."""
    quarantine, back = Quarantine(), list[str]()
    quarantine.add(lambda: back.append("slot"))
    quarantine.rest(8.0)
    quarantine.release(8.0 + QUARANTINE_SECONDS - 0.125)
    assert back == []
    quarantine.release(8.0 + QUARANTINE_SECONDS)
    quarantine.release(20.0)
    assert (len(quarantine), back) == (0, ["slot"])
    assert QUARANTINE_SECONDS >= 1


def test_each_batch_rests_by_itself() -> None:
    """A later plan neither shortens nor prolongs the rest of an earlier one."""
    quarantine, back = Quarantine(), list[str]()
    quarantine.add(lambda: back.append("first"))
    quarantine.rest(8.0)
    quarantine.add(lambda: back.append("second"))
    quarantine.rest(8.5)
    quarantine.add(lambda: back.append("third"))
    quarantine.release(9.25)
    assert back == ["first"]
    quarantine.release(9.5)
    assert (len(quarantine), back) == (1, ["first", "second"])
