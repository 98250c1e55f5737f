# SPDX-License-Identifier: Apache-2.0
"""Ids and ranges of slots: which are free, and which must rest before they are given again.

A reader in the kernel may have looked up a service a moment before it changed. What an update
frees is therefore kept as it was for QUARANTINE_SECONDS, counted from when the update was
carried out; time comes from outside.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from ebpflb.plan.entries import Range

QUARANTINE_SECONDS = 1.0


class Full(Exception):
    """There is no room left, or none that has rested long enough."""


class Ids:
    """Numbers from 1 up to a capacity, given round and round: a freed one comes back last."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: set[int] = set()
        self.last = 0

    @property
    def free(self) -> int:
        """How many can be taken."""
        return self.capacity - 1 - len(self.used)

    def take(self) -> int:
        if not self.free:
            raise Full("no free id")
        self.last = self._after(self.last)
        while self.last in self.used:
            self.last = self._after(self.last)
        self.used.add(self.last)
        return self.last

    def adopt(self, number: int) -> None:
        """Marks as used a number that the maps hold already."""
        self.used.add(number)
        self.last = max(self.last, number)

    def give_back(self, number: int) -> None:
        self.used.discard(number)

    def _after(self, number: int) -> int:
        return number + 1 if number + 1 < self.capacity else 1


class Ranges:
    """A free list over an array: first fit, neighbours joined when they come back."""

    def __init__(self, capacity: int) -> None:
        self.holes = [Range(0, capacity)]

    @property
    def free(self) -> int:
        return sum(hole.size for hole in self.holes)

    def take(self, size: int) -> Range:
        if not size:
            return Range(0, 0)
        for index, hole in enumerate(self.holes):
            if hole.size >= size:
                rest = Range(hole.base + size, hole.size - size)
                self.holes[index : index + 1] = [rest] if rest.size else []
                return Range(hole.base, size)
        raise Full(f"map slots has no {size} free slots in a row")

    def adopt(self, taken: Range) -> list[Range]:
        """Marks as used a range that the maps refer to already; it may overlap what is used.

        Returns the parts of it that were free.
        """
        if not taken.size:
            return []
        end = taken.base + taken.size
        first = bisect_left(self.holes, Range(taken.base, 0))
        if first and sum(self.holes[first - 1]) > taken.base:
            first -= 1
        last = bisect_left(self.holes, Range(end, 0))
        kept: list[Range] = []
        found: list[Range] = []
        for hole in self.holes[first:last]:
            base = max(hole.base, taken.base)
            found.append(Range(base, min(sum(hole), end) - base))
            before = Range(hole.base, min(hole.size, taken.base - hole.base))
            after = Range(max(end, hole.base), hole.base + hole.size - max(end, hole.base))
            kept += [part for part in (before, after) if part.size > 0]
        self.holes[first:last] = kept
        return found

    def give_back(self, taken: Range) -> None:
        if not taken.size:
            return
        index = bisect_left(self.holes, taken)
        base, end = taken.base, taken.base + taken.size
        if index < len(self.holes) and self.holes[index].base == end:
            end += self.holes.pop(index).size
        if index and sum(self.holes[index - 1]) == base:
            base = self.holes.pop(index - 1).base
        insort(self.holes, Range(base, end - base))


GiveBack = Callable[[], None]


class Quarantine:
    """What was freed: first by a plan that is not carried out yet, then resting."""

    def __init__(self) -> None:
        self.planned: list[GiveBack] = []
        self.resting: deque[tuple[float, list[GiveBack]]] = deque()

    def __len__(self) -> int:
        return len(self.planned) + sum(len(batch) for _, batch in self.resting)

    def add(self, give_back: GiveBack) -> None:
        self.planned.append(give_back)

    def rest(self, now: float) -> None:
        """The plan has been carried out at ``now``, in seconds of a clock that never steps."""
        if self.planned:
            self.resting.append((now, self.planned))
            self.planned = []

    def release(self, now: float) -> None:
        """Gives back what has rested long enough."""
        while self.resting and now - self.resting[0][0] >= QUARANTINE_SECONDS:
            for give_back in self.resting.popleft()[1]:
                give_back()
