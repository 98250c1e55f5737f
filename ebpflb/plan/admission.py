# SPDX-License-Identifier: Apache-2.0
"""Whom restricted frontends let in: what map source_ranges holds, must gain and must lose.

A service that is restricted loses at once what it no longer lets in. One that has been opened
keeps its ranges until they have rested: a reader may have seen it restricted a moment before, and
nobody else asks for them.
"""

from collections.abc import Iterable
from functools import partial

from ebpflb.plan.entries import SourceRange
from ebpflb.plan.numbers import Quarantine

Ranges = frozenset[SourceRange]


class Admission:
    """``held`` is what the map has, as of the end of the plan."""

    def __init__(self, capacity: int, quarantine: Quarantine) -> None:
        self.capacity, self.quarantine = capacity, quarantine
        self.held: set[SourceRange] = set()
        self.asked: dict[int, Ranges] = {}  # by service id: those of restricted services
        self.idle: dict[int, Ranges] = {}  # and those that rest
        self.gained: list[SourceRange] = []
        self.lost: set[SourceRange] = set()

    def adopt(self, number: int, ranges: Ranges) -> None:
        """The map holds these for a restricted service."""
        self.held |= ranges
        self.asked[number] = ranges

    def adopt_strays(self, ranges: Iterable[SourceRange]) -> None:
        """And these for nobody; they go with the first plan, unless it asks for them."""
        self.held.update(ranges)
        self.lost.update(ranges)

    def fit(self, ranges: Ranges) -> Ranges:
        """Those that have a place already, and as many others as there is room for."""
        more = sorted(ranges - self.held, key=str)
        return (ranges & self.held) | frozenset(more[: self.capacity - len(self.held)])

    def change(self, number: int, ranges: Ranges, *, restricted: bool) -> None:
        """What a service asks for from now on; nothing unless it is restricted."""
        former = self.asked.pop(number, Ranges()) | self.idle.pop(number, Ranges())
        self.gained += sorted(ranges - self.held, key=str)
        self.held |= ranges
        self.lost -= ranges
        if restricted:
            self.asked[number] = ranges
            self.lost |= former - ranges
        elif former:
            self.idle[number] = former
            self.quarantine.add(partial(self._release, number, former))

    def forget(self, number: int) -> None:
        """The service goes, and all frontends of it before this."""
        self.lost |= self.asked.pop(number, Ranges()) | self.idle.pop(number, Ranges())

    def settle(self) -> tuple[list[SourceRange], list[SourceRange]]:
        """What the map must gain and what it must lose since the last time."""
        gained, lost = self.gained, sorted(self.lost, key=str)
        self.held -= self.lost
        self.gained, self.lost = [], set()
        return gained, lost

    def _release(self, number: int, ranges: Ranges) -> None:
        """Unless they were asked for again meanwhile."""
        if self.idle.get(number) is ranges:
            self.lost |= self.idle.pop(number)
