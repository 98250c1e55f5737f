# SPDX-License-Identifier: Apache-2.0
"""IdAllocator, ranges of slots, and the quarantine between two owners."""

import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from ebpflb.entries.services import Range
from ebpflb.plan.allocators import QUARANTINE_SECONDS, IdAllocator, Quarantine, SlotAllocator
from tests.load import scaled

SLOTS = 24


@given(some.lists(some.integers(0, 5)))
@settings(max_examples=scaled(60), deadline=None)
def test_ids_are_unique(moves: list[int]) -> None:
    """No id is given to two owners, however many are freed in between."""
    ids, taken = IdAllocator(5), list[int]()
    for move in moves:
        if move < len(taken):
            ids.free(taken.pop(move))
        elif ids.available:
            taken.append(ids.allocate())
        assert len(set(taken)) == len(taken) == ids.capacity - 1 - ids.available


@given(some.lists(some.integers(0, 6)), some.sets(some.integers(0, 40)))
@settings(max_examples=scaled(100), deadline=None)
def test_an_id_comes_again_after_all_that_were_free(moves: list[int], ends: set[int]) -> None:
    """The free id that was free for the longest time is given next. After a start, when this is
    unknown, the first free ids after the last one are given.
    """
    ids, taken, last, freed = IdAllocator(6), list[int](), 0, list[int]()
    for step, move in enumerate(moves):
        if step in ends:
            ids, freed = IdAllocator(6), []
            ids.mark_used(taken)
            ids.go_on_behind(last)
        if move < len(taken):
            freed.append(taken.pop(move))
            ids.free(freed[-1])
        elif ids.available:
            behind = [*range(last + 1, 6), *range(1, last + 1)]
            unused = [id for id in behind if id not in taken and id not in freed]
            last = unused[0] if unused else freed.pop(0)
            taken.append(ids.allocate())
            assert taken[-1] == last


def test_freed_ids_are_no_objects() -> None:
    """Each replaced endpoint frees an id, which waits until all other ids were given."""
    ids = IdAllocator(10_000)
    before = sys.getallocatedblocks()
    for _ in range(9_000):
        ids.free(ids.allocate())
    assert sys.getallocatedblocks() - before < 100


@pytest.mark.parametrize("last", [0, 6, 2**32 - 1])
def test_last_id_not_recorded(last: int) -> None:
    """If an older version recorded no last id, or a damaged one, the largest id in use counts."""
    ids = IdAllocator(6)
    ids.mark_used([3])
    ids.go_on_behind(last)
    assert ids.allocate() == 4


_sizes = some.integers(1, 6)
_indexes = some.integers(0, SLOTS - 1)


def check_holes(ranges: SlotAllocator, used: set[int]) -> None:
    """Check that holes are disjoint, sorted, joined, and complete together with ``used``."""
    free_ranges = ranges.free_ranges
    assert all(sum(one) < other.base for one, other in pairwise(free_ranges))
    available = [
        slot for free_range in free_ranges for slot in range(free_range.base, sum(free_range))
    ]
    assert sorted([*available, *used]) == list(range(SLOTS))
    assert ranges.available == len(available)


@given(some.lists(some.tuples(some.booleans(), _sizes, _indexes), max_size=40))
@settings(max_examples=scaled(150), deadline=None)
def test_free_ranges_are_disjoint_and_complete(moves: list[tuple[bool, int, int]]) -> None:
    """After any allocations and releases, free ranges are disjoint, sorted, joined and complete."""
    ranges, taken = SlotAllocator(SLOTS), list[Range]()
    for giving, size, index in moves:
        if giving and taken:
            ranges.free(taken.pop(index % len(taken)))
        elif any(free_range.size >= size for free_range in ranges.free_ranges):
            found = ranges.allocate(size)
            assert found
            taken.append(found)
        check_holes(ranges, {slot for run in taken for slot in range(run.base, sum(run))})


@given(some.lists(some.builds(Range, _indexes, some.integers(0, 6)), max_size=8))
@settings(max_examples=scaled(100), deadline=None)
def test_used_ranges(runs: list[Range]) -> None:
    """Ranges that the maps refer to are used, even if they overlap."""
    ranges, used = SlotAllocator(SLOTS), set[int]()
    for run in runs:
        ranges.mark_used(run)
        used |= set(range(run.base, min(sum(run), SLOTS)))
    free_ranges = {
        slot
        for free_range in ranges.free_ranges
        for slot in range(free_range.base, sum(free_range))
    }
    assert free_ranges == set(range(SLOTS)) - used
    assert ranges.available == len(free_ranges)


def test_rests_a_second() -> None:
    """Freed numbers become available once, a second after the plan was written."""
    quarantine, back = Quarantine(), list[str]()
    quarantine.add(lambda: back.append("slot"))
    quarantine.start(8.0)
    quarantine.release(8.0 + QUARANTINE_SECONDS - 0.125)
    assert back == []
    quarantine.release(8.0 + QUARANTINE_SECONDS)
    quarantine.release(20.0)
    assert (len(quarantine), back) == (0, ["slot"])
    assert QUARANTINE_SECONDS >= 1
