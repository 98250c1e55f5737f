# SPDX-License-Identifier: Apache-2.0
"""The entries of map source_ranges: which clients restricted frontends admit.

While a service is restricted, ranges that it no longer admits are removed at once. When it is no
longer restricted its ranges stay for the quarantine: a program may have read the service while it
was restricted, and no other service reads them.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ebpflb.plan.allocators import Quarantine
from ebpflb.plan.entries import SourceRange

_Ranges = frozenset[SourceRange]


class SourceRangesSnapshot(NamedTuple):
    """The entries of the map at one time, and how often any had been removed until then."""

    ranges: Sequence[SourceRange]
    removals: int


class SourceRanges:
    """``present``: the entries of the map after the plan that is being made."""

    def __init__(self, capacity: int, quarantine: Quarantine) -> None:
        self.capacity, self.quarantine = capacity, quarantine
        self.present: set[SourceRange] = set()
        self.restricted: dict[int, _Ranges] = {}  # by id of the service
        self.quarantined: dict[int, _Ranges] = {}  # likewise, of those that were restricted
        self.added: list[SourceRange] = []
        self.removed: set[SourceRange] = set()
        self.removals = 0

    def load(self, service_id: int, ranges: _Ranges) -> None:
        """The map has these ranges already, of a restricted service."""
        self.present |= ranges
        self.restricted[service_id] = ranges

    def load_leftovers(self, ranges: Iterable[SourceRange]) -> None:
        """The map has these too, of no service; the first plan removes those it does not need."""
        self.present.update(ranges)
        self.removed.update(ranges)

    @property
    def free(self) -> int:
        """How many more entries the map has space for."""
        return self.capacity - len(self.present)

    def change(self, service_id: int, ranges: _Ranges, *, restricted: bool) -> None:
        """The ranges of a service from now on; there are none unless it is restricted."""
        former = self.restricted.pop(service_id, _Ranges()) | self.quarantined.pop(
            service_id, _Ranges()
        )
        self.added += sorted(ranges - self.present, key=str)
        self.present |= ranges
        self.removed -= ranges
        if restricted:
            self.restricted[service_id] = ranges
            self.removed |= former - ranges
        elif former:
            self.quarantined[service_id] = former
            self.quarantine.add(partial(self._release, service_id, former))

    def remove(self, service_id: int) -> None:
        """The service is deleted; all frontends of it are removed before its ranges."""
        self.removed |= self.restricted.pop(service_id, _Ranges())
        self.removed |= self.quarantined.pop(service_id, _Ranges())

    def snapshot(self) -> SourceRangesSnapshot:
        return SourceRangesSnapshot(tuple(self.present), self.removals)

    def take_changes(self) -> tuple[list[SourceRange], list[SourceRange]]:
        """The entries to add and to remove since the last call."""
        added, removed = self.added, sorted(self.removed, key=str)
        self.present -= self.removed
        self.removals += bool(removed)
        self.added, self.removed = [], set()
        return added, removed

    def _release(self, service_id: int, ranges: _Ranges) -> None:
        """Unless the service has been restricted again meanwhile."""
        if self.quarantined.get(service_id) is ranges:
            self.removed |= self.quarantined.pop(service_id)
