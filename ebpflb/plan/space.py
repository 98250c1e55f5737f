# SPDX-License-Identifier: Apache-2.0
"""Whether a service port fits into the maps, and what of it does if it does not.

A service port that has more endpoints than fit waits. What it still wants of what it has stays,
what it does not want any more goes, and no other service port may grow into what it so gives up: it
gets as much as it had, as soon as that is out of quarantine. Some backend ids are kept for service
ports that exchange endpoints, which therefore need not wait.
"""

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.allocators import Capacity, IdAllocator, MapFull, Quarantine, SlotAllocator
from ebpflb.plan.desired_service import DesiredService
from ebpflb.plan.entries import Frontend
from ebpflb.plan.frontends import Frontends
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.service_entries import NO_ENTRIES, ServiceEntries
from ebpflb.plan.table_space import TableSpace

_FAMILIES = {str(family): family for family in Family}
_NAME = re.compile(rf"(.+)/(.+):(.*)/({'|'.join(Protocol.__members__)})/({'|'.join(_FAMILIES)})")
KEPT_PART = 64  # one in so many backend ids is kept


Actual = Mapping[PortName, ServiceEntries]


class MapUsage(NamedTuple):
    """How much of the maps a service port has, or may have again."""

    service_ids: int = 0
    backend_ids: int = 0
    frontends: int = 0


class Waiting:
    """The service ports that do not fit: what each had at most, and may have again."""

    def __init__(self) -> None:
        self._had: dict[PortName, MapUsage] = {}
        self._owed: dict[PortName, MapUsage] = {}
        self._total = MapUsage()

    def __contains__(self, name: PortName) -> bool:
        return name in self._had

    def had(self, name: PortName) -> MapUsage:
        return self._had.get(name, MapUsage())

    def reduced(self, name: PortName, before: ServiceEntries, now: ServiceEntries) -> None:
        """A service port that waits has been reduced from one to the other."""
        had = MapUsage(*map(max, self.had(name), _share(before)))
        self._had[name] = had
        self._set(name, MapUsage(*(max(0, a - b) for a, b in zip(had, _share(now), strict=True))))

    def load(self, had: Mapping[str, Mapping[str, int]], actual: Actual) -> None:
        """What ``named`` gave, of an earlier planner of the same maps, which hold ``actual``.

        What cannot be read is left out.
        """
        for text, share in had.items():
            name = _name(text)
            if name is not None:
                now = actual.get(name, NO_ENTRIES)
                self._had[name] = MapUsage(1, share.get("backends", 0), share.get("frontends", 0))
                self.reduced(name, now, now)

    def named(self) -> dict[str, dict[str, int]]:
        """What each had, by a text that tells the service port, for people and for ``load``."""
        had = sorted(self._had.items())
        return {
            _text(name): {"backends": share.backend_ids, "frontends": share.frontends}
            for name, share in had
        }

    def names(self) -> Set[PortName]:
        return self._had.keys()

    def forget(self, name: PortName) -> None:
        """The service port fits, or is deleted."""
        if self._had.pop(name, None):
            self._set(name, MapUsage())
            del self._owed[name]

    def owed_to_others(self, name: PortName) -> MapUsage:
        return MapUsage(
            *(a - b for a, b in zip(self._total, self._owed.get(name, MapUsage()), strict=True))
        )

    def _set(self, name: PortName, owed: MapUsage) -> None:
        others = self.owed_to_others(name)
        self._owed[name] = owed
        self._total = MapUsage(*(a + b for a, b in zip(others, owed, strict=True)))


class Space:
    """The allocators of the maps, and who waits for them."""

    def __init__(self, capacity: Capacity, frontends: Frontends) -> None:
        self.capacity = capacity
        self.frontends = frontends
        self.service_ids = IdAllocator(capacity.service_ids)
        self.backend_ids = IdAllocator(capacity.backend_ids)
        self.slots = SlotAllocator(capacity.slots)
        self.tables = TableSpace(capacity.choices)
        self.waiting = Waiting()

    def used_entries(self) -> dict[str, int]:
        """As ``Planner.used_entries``, of the maps that are allocated here."""
        return {
            "services": len(self.frontends.owners),
            "slots": self.capacity.slots - self.slots.available,
            "choices": self.capacity.choices - self.tables.choices.available,
            "backend_slots": len(self.backend_ids.used),
            "service_stats": len(self.service_ids.used),
        }

    def check(
        self,
        name: PortName,
        old: ServiceEntries,
        known: tuple[int, ...],
        frontends: Iterable[Frontend],
    ) -> None:
        """Raises MapFull with the map's name; nothing has been allocated by then.

        ``known``: the id of each desired backend; 0: it needs one.
        """
        owed = self.waiting.owed_to_others(name)
        self.frontends.check_capacity(frontends, owed.frontends)
        if not old.id and self.service_ids.available <= owed.service_ids:
            raise MapFull(f"map service_stats is full ({self.capacity.service_ids} ids)")
        if (new := known.count(0)) and new > self._backend_ids(name, old, len(known)):
            raise MapFull(f"map backend_slots is full ({self.capacity.backend_ids} ids)")

    def free_leftovers(self, contents: MapContents, quarantine: Quarantine) -> None:
        """A leftover block may overlap one that is used; only the rest of it is freed."""
        self.tables.wrong |= contents.wrong_tables
        leftovers = (
            (self.slots, contents.leftover_blocks),
            (self.tables.choices, contents.leftover_tables),
        )
        for allocator, blocks in leftovers:
            for part in (part for block in blocks for part in allocator.mark_used(block)):
                quarantine.add(partial(allocator.free, part))

    def reduced(self, desired: DesiredService, old: ServiceEntries) -> DesiredService:
        """With the backends only that it has already, and with as many new ones as it had others,
        as far as they fit. Raises MapFull if what stays does not fit either.
        """
        known = old.ids_for(desired)
        stay = len(known) - known.count(0)
        had = max(len(old.ids), self.waiting.had(desired.name).backend_ids)
        new = min(had - stay, self._backend_ids(desired.name, old, 0))
        gap = max((gap.size for gap in self.slots.free_ranges), default=0)
        for count in (new, max(0, min(new, gap - stay))):
            found = _only(desired, known, count)
            if old.has_backends_of(found) or len(found.backends) <= gap:
                return found
        raise MapFull(f"map slots has no {stay} free slots in a row")

    def _backend_ids(self, name: PortName, old: ServiceEntries, wanted: int) -> int:
        """How many ids it may get if it wants so many backends."""
        grows = wanted > max(len(old.ids), self.waiting.had(name).backend_ids)
        kept = self.capacity.backend_ids // KEPT_PART if grows else 0
        owed = self.waiting.owed_to_others(name).backend_ids
        return max(0, self.backend_ids.available - owed - kept)


def _only(desired: DesiredService, known: tuple[int, ...], new: int) -> DesiredService:
    """With the first ``new`` of the backends that have no id yet."""
    backends = []
    for backend, id in zip(desired.backends, known, strict=True):
        new -= not id
        if id or new >= 0:
            backends.append(backend)
    return replace(desired, backends=tuple(backends))


def _text(name: PortName) -> str:
    return f"{name.namespace}/{name.service}:{name.port}/{name.protocol.name}/{name.family}"


def _name(text: str) -> PortName | None:
    parts = _NAME.fullmatch(text)
    if parts is None:
        return None
    namespace, service, port, protocol, family = parts.groups()
    return PortName(namespace, service, port, Protocol[protocol], _FAMILIES[family])


def _share(entries: ServiceEntries) -> MapUsage:
    return MapUsage(int(entries is not NO_ENTRIES), len(entries.ids), len(entries.services))
