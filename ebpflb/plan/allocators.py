# SPDX-License-Identifier: Apache-2.0
"""Ids and ranges of slots: which are free, and which are in quarantine before they are used again.

A program in the kernel may have looked up a service just before the service changed. So ids and
slots that an update frees keep their content for QUARANTINE_SECONDS after the update was written.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from mmap import MAP_PRIVATE, mmap
from typing import NamedTuple

from ebpflb.entries.services import Range, Translation
from ebpflb.plan.desired import DesiredBackend

QUARANTINE_SECONDS = 1.0


class Capacity(NamedTuple):
    """The number of entries of each map."""

    services: int
    slots: int
    service_ids: int
    backend_ids: int
    source_ranges: int
    choices: int = 0
    endpoints: int = 0  # at most; 0: as many as there are backend ids


_UNUSED, _USED, _FREED = range(3)


class IdAllocator(Collection[int]):
    """The used ids. Allocates ids from 1 on: first those that were never used, then freed ones.

    A freed id is allocated again as late as possible, after all ids that are free already: clients,
    sockets and flows remember a service's and a backend's id together, some as long as they live.
    An id takes one byte, and four once it was freed; in a Python set or deque it would take 40.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.last = capacity, 0
        self._states, self._count = bytearray(capacity), 0
        # A ring of the ids freed since the start; its pages take no memory before they are used.
        self._freed = memoryview(mmap(-1, 4 * capacity, MAP_PRIVATE)).cast("I")
        self._first = self._waiting = 0

    def __contains__(self, id: object) -> bool:
        return isinstance(id, int) and 0 <= id < self.capacity and self._states[id] == _USED

    def __iter__(self) -> Iterator[int]:
        return (id for id, state in enumerate(self._states) if state == _USED)

    def __len__(self) -> int:
        return self._count

    @property
    def available(self) -> int:
        """The number of ids that can be allocated."""
        return self.capacity - 1 - self._count

    def allocate(self) -> int:
        """Return the next free id; at least one must be ``available``."""
        if self.available > self._waiting:
            self.last = self._after(self.last)
            while self._states[self.last] != _UNUSED:
                self.last = self._after(self.last)
        else:
            self.last = self._freed[self._first]
            self._first, self._waiting = (self._first + 1) % self.capacity, self._waiting - 1
        self._use(self.last)
        return self.last

    def mark_used(self, ids: Collection[int]) -> None:
        """Mark ids that the maps already hold, before any id is freed."""
        for id in ids:
            self._use(id)
        self.last = max(self.last, *ids, 0)

    def go_on_behind(self, last: int) -> None:
        """Allocate the ids after ``last`` next; 0: after the largest id that is used."""
        if 0 < last < self.capacity:
            self.last = last

    def free(self, id: int) -> None:
        self._count -= self._states[id] == _USED
        self._states[id] = _FREED
        self._freed[(self._first + self._waiting) % self.capacity] = id
        self._waiting += 1

    def _use(self, id: int) -> None:
        self._count += self._states[id] != _USED
        self._states[id] = _USED

    def _after(self, id: int) -> int:
        return id + 1 if id + 1 < self.capacity else 1


class FormerIds:
    """The backend ids that programs with another map layout still choose, while they are attached.

    Meanwhile such an id must keep leading to the same endpoint, so only a backend with that
    endpoint gets the id. ``taken`` holds the ids whose translation is already in force.
    """

    def __init__(self, translations: Iterable[Translation]) -> None:
        self.taken: set[int] = set()
        self._unclaimed = {translation.id: translation for translation in translations}
        self._ids = {(it.address, it.port): it.id for it in self._unclaimed.values()}

    def fill(self, known: Sequence[int], backends: Sequence[DesiredBackend]) -> tuple[int, ...]:
        """Return the id of each backend.

        An id of 0 is replaced by the endpoint's former id, if any.
        """
        if not self._unclaimed:
            return tuple(known)
        pairs = zip(known, backends, strict=True)
        return tuple([id or self._ids.get(backend.endpoint, 0) for id, backend in pairs])

    def take(self, ids: Iterable[int]) -> None:
        """Note that backends got these ids; some may be former ids."""
        for id in self._unclaimed.keys() & ids if self._unclaimed else ():
            _, address, port = self._unclaimed.pop(id)
            self._ids.pop((address, port), None)
            self.taken.add(id)

    def take_unclaimed(self) -> list[Translation]:
        """Return the translations that no backend got.

        Called when no program chooses them any more.
        """
        unclaimed, self._unclaimed, self.taken = list(self._unclaimed.values()), {}, set()
        return unclaimed


class SlotAllocator:
    """Allocates ranges of an array: first fit; neighbouring free ranges are joined."""

    def __init__(self, capacity: int) -> None:
        self.free_ranges = [Range(0, capacity)]
        self.available = capacity  # all free slots, in all ranges

    def allocate(self, size: int) -> Range | None:
        """Return the first free range of this size, or None if no free range is large enough."""
        if not size:
            return Range(0, 0)
        for index, gap in enumerate(self.free_ranges):
            if gap.size >= size:
                rest = Range(gap.base + size, gap.size - size)
                self.free_ranges[index : index + 1] = [rest] if rest.size else []
                self.available -= size
                return Range(gap.base, size)
        return None

    def mark_used(self, taken: Range) -> list[Range]:
        """Mark a range that the maps already refer to.

        It may overlap ranges that are marked as used.

        Returns the parts of the range that were free.
        """
        if not taken.size:
            return []
        end = taken.base + taken.size
        first = bisect_left(self.free_ranges, Range(taken.base, 0))
        if first and sum(self.free_ranges[first - 1]) > taken.base:
            first -= 1
        last = bisect_left(self.free_ranges, Range(end, 0))
        still_free: list[Range] = []
        taken_parts: list[Range] = []
        for gap in self.free_ranges[first:last]:
            base = max(gap.base, taken.base)
            taken_parts.append(Range(base, min(sum(gap), end) - base))
            before = Range(gap.base, min(gap.size, taken.base - gap.base))
            after = Range(max(end, gap.base), gap.base + gap.size - max(end, gap.base))
            still_free += [part for part in (before, after) if part.size > 0]
        self.free_ranges[first:last] = still_free
        self.available -= sum(part.size for part in taken_parts)
        return taken_parts

    def free(self, taken: Range) -> None:
        if not taken.size:
            return
        self.available += taken.size
        index = bisect_left(self.free_ranges, taken)
        base, end = taken.base, taken.base + taken.size
        if index < len(self.free_ranges) and self.free_ranges[index].base == end:
            end += self.free_ranges.pop(index).size
        if index and sum(self.free_ranges[index - 1]) == base:
            base = self.free_ranges.pop(index - 1).base
        insort(self.free_ranges, Range(base, end - base))


Release = Callable[[], None]


class Quarantine:
    """Freed ids and slots: ``pending`` until their plan is written, then ``waiting``."""

    def __init__(self) -> None:
        self.pending: list[Release] = []
        self.waiting: deque[tuple[float, list[Release]]] = deque()

    def __len__(self) -> int:
        return len(self.pending) + sum(len(batch) for _, batch in self.waiting)

    def add(self, free: Release) -> None:
        self.pending.append(free)

    def start(self, now: float) -> None:
        """Start the quarantine of a plan that was written at ``now`` (seconds, monotonic clock)."""
        if self.pending:
            self.waiting.append((now, self.pending))
            self.pending = []

    @property
    def due(self) -> float:
        """When ``release`` frees something next; infinity means nothing is in quarantine."""
        return self.waiting[0][0] + QUARANTINE_SECONDS if self.waiting else math.inf

    def release(self, now: float) -> None:
        """Free everything that has been in quarantine long enough."""
        while self.waiting and now - self.waiting[0][0] >= QUARANTINE_SECONDS:
            for free in self.waiting.popleft()[1]:
                free()
