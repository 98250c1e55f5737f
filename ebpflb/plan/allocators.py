# SPDX-License-Identifier: Apache-2.0
"""Ids and ranges of slots: which are free, and which are in quarantine before they are used again.

A reader in the kernel may have looked up a service a moment before it changed. What an update
frees is therefore kept as it was for QUARANTINE_SECONDS, counted from when the update was
carried out; time comes from outside.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from ebpflb.plan.entries import Range

QUARANTINE_SECONDS = 1.0


class MapFull(Exception):
    """A map has no free entries, or none whose quarantine has ended."""


class IdAllocator:
    """Numbers from 1 up to a capacity, given round and round: a freed one comes back last."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: set[int] = set()
        self.last = 0

    @property
    def available(self) -> int:
        """How many can be taken."""
        return self.capacity - 1 - len(self.used)

    def allocate(self) -> int:
        if not self.available:
            raise MapFull("no free id")
        self.last = self._after(self.last)
        while self.last in self.used:
            self.last = self._after(self.last)
        self.used.add(self.last)
        return self.last

    def mark_used(self, number: int) -> None:
        """Marks as used a number that the maps hold already."""
        self.used.add(number)
        self.last = max(self.last, number)

    def free(self, number: int) -> None:
        self.used.discard(number)

    def _after(self, number: int) -> int:
        return number + 1 if number + 1 < self.capacity else 1


class SlotAllocator:
    """A free list over an array: first fit, neighbours joined when they come back."""

    def __init__(self, capacity: int) -> None:
        self.free_ranges = [Range(0, capacity)]

    @property
    def available(self) -> int:
        return sum(gap.size for gap in self.free_ranges)

    def allocate(self, size: int) -> Range:
        if not size:
            return Range(0, 0)
        for index, gap in enumerate(self.free_ranges):
            if gap.size >= size:
                rest = Range(gap.base + size, gap.size - size)
                self.free_ranges[index : index + 1] = [rest] if rest.size else []
                return Range(gap.base, size)
        raise MapFull(f"map slots has no {size} free slots in a row")

    def mark_used(self, taken: Range) -> list[Range]:
        """Marks as used a range that the maps refer to already; it may overlap what is used.

        Returns the parts of it that were free.
        """
        if not taken.size:
            return []
        end = taken.base + taken.size
        first = bisect_left(self.free_ranges, Range(taken.base, 0))
        if first and sum(self.free_ranges[first - 1]) > taken.base:
            first -= 1
        last = bisect_left(self.free_ranges, Range(end, 0))
        kept: list[Range] = []
        found: list[Range] = []
        for gap in self.free_ranges[first:last]:
            base = max(gap.base, taken.base)
            found.append(Range(base, min(sum(gap), end) - base))
            before = Range(gap.base, min(gap.size, taken.base - gap.base))
            after = Range(
                max(end, gap.base),
                gap.base + gap.size - max(end, gap.base),
            )
            kept += [part for part in (before, after) if part.size > 0]
        self.free_ranges[first:last] = kept
        return found

    def free(self, taken: Range) -> None:
        if not taken.size:
            return
        index = bisect_left(self.free_ranges, taken)
        base, end = taken.base, taken.base + taken.size
        if index < len(self.free_ranges) and self.free_ranges[index].base == end:
            end += self.free_ranges.pop(index).size
        if index and sum(self.free_ranges[index - 1]) == base:
            base = self.free_ranges.pop(index - 1).base
        insort(self.free_ranges, Range(base, end - base))


Release = Callable[[], None]


class Quarantine:
    """What was freed: first by a plan that is not carried out yet, then waiting."""

    def __init__(self) -> None:
        self.pending: list[Release] = []
        self.waiting: deque[tuple[float, list[Release]]] = deque()

    def __len__(self) -> int:
        return len(self.pending) + sum(len(batch) for _, batch in self.waiting)

    def add(self, free: Release) -> None:
        self.pending.append(free)

    def start(self, now: float) -> None:
        """The plan has been carried out at ``now``, in seconds of a clock that never steps."""
        if self.pending:
            self.waiting.append((now, self.pending))
            self.pending = []

    def release(self, now: float) -> None:
        """Gives back what has rested long enough."""
        while self.waiting and now - self.waiting[0][0] >= QUARANTINE_SECONDS:
            for free in self.waiting.popleft()[1]:
                free()
