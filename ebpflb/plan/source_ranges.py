# SPDX-License-Identifier: Apache-2.0
"""Whom restricted frontends let in: what map source_ranges holds, must gain and must lose.

A service that is restricted loses at once what it no longer lets in. One that has been opened
keeps its ranges until they have rested: a reader may have seen it restricted a moment before, and
nobody else asks for them.
"""

from collections.abc import Iterable
from functools import partial

from ebpflb.plan.allocators import Quarantine
from ebpflb.plan.entries import SourceRange

_Ranges = frozenset[SourceRange]


class SourceRanges:
    """``held`` is what the map has, as of the end of the plan."""

    def __init__(self, capacity: int, quarantine: Quarantine) -> None:
        self.capacity, self.quarantine = capacity, quarantine
        self.held: set[SourceRange] = set()
        self.restricted: dict[int, _Ranges] = {}  # by service id: those of restricted services
        self.quarantined: dict[int, _Ranges] = {}  # and those that rest
        self.added: list[SourceRange] = []
        self.removed: set[SourceRange] = set()

    def load(self, number: int, ranges: _Ranges) -> None:
        """The map holds these for a restricted service."""
        self.held |= ranges
        self.restricted[number] = ranges

    def load_leftovers(self, ranges: Iterable[SourceRange]) -> None:
        """And these for nobody; they go with the first plan, unless it asks for them."""
        self.held.update(ranges)
        self.removed.update(ranges)

    def fitting(self, ranges: _Ranges) -> _Ranges:
        """Those that have a place already, and as many others as there is room for."""
        more = sorted(ranges - self.held, key=str)
        return (ranges & self.held) | frozenset(more[: self.capacity - len(self.held)])

    def change(self, number: int, ranges: _Ranges, *, restricted: bool) -> None:
        """What a service asks for from now on; nothing unless it is restricted."""
        former = self.restricted.pop(number, _Ranges()) | self.quarantined.pop(number, _Ranges())
        self.added += sorted(ranges - self.held, key=str)
        self.held |= ranges
        self.removed -= ranges
        if restricted:
            self.restricted[number] = ranges
            self.removed |= former - ranges
        elif former:
            self.quarantined[number] = former
            self.quarantine.add(partial(self._release, number, former))

    def remove(self, number: int) -> None:
        """The service goes, and all frontends of it before this."""
        self.removed |= self.restricted.pop(number, _Ranges()) | self.quarantined.pop(
            number, _Ranges()
        )

    def take_changes(self) -> tuple[list[SourceRange], list[SourceRange]]:
        """What the map must gain and what it must lose since the last time."""
        added, removed = self.added, sorted(self.removed, key=str)
        self.held -= self.removed
        self.added, self.removed = [], set()
        return added, removed

    def _release(self, number: int, ranges: _Ranges) -> None:
        """Unless they were restricted for again meanwhile."""
        if self.quarantined.get(number) is ranges:
            self.removed |= self.quarantined.pop(number)
