# SPDX-License-Identifier: Apache-2.0
"""How much of a service port fits into the maps, and why the rest does not.

A namespace has at most its share of each map, so one tenant cannot take the space of all others;
freed entries of its Services count until their quarantine ends. The tables of one Service have an
additional limit in map choices. All endpoints together take at most a third of the slots
(``Capacity.endpoints``), so that there is room for a Service's new slots on one side of its former
ones, however large it is.

Each part of a service port fits or does not. Frontends that do not fit are left out. If its new
backends do not fit, all new ones are left out, and existing ones that are still wanted stay. Source
ranges that do not fit are left out, so a restricted frontend never admits too many clients. If its
table does not fit, connections are distributed at random. A new service port whose backends do not
fit is not programmed.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from ebpflb.entries.services import NO_TABLE, Flags, Frontend, Range
from ebpflb.model.endpoints import finished
from ebpflb.model.events import Key
from ebpflb.model.services import PortName
from ebpflb.plan import tables
from ebpflb.plan.allocators import Capacity, FormerIds, IdAllocator, Quarantine, SlotAllocator
from ebpflb.plan.desired import DesiredBackend, DesiredService, Lack
from ebpflb.plan.frontends import Frontends, SourceRanges
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.service_entries import (
    LISTS,
    NO_ENTRIES,
    ServiceEntries,
    TableKind,
    service_entries,
)

# The service ports that do not fit completely, and when each is tried again.
#
# A service port is tried again only after something was freed that it could use, and each plan
# tries only a few: however many wait, other changes take no longer.

MOST_TRIED, MOST_PLANNED = 64, 4  # with one plan: a port may have 1,000 source ranges
EVERYONE = ""  # instead of a namespace: any namespace can free the space


class Waiting:
    """The waiting service ports.

    ``lacks``: what each of them lacks, by Service. ``changed``: the Services with a service port
    that began or stopped waiting, or waits for another reason; the reader empties it.
    """

    def __init__(self) -> None:
        self.lacks: dict[Key, dict[PortName, Lack]] = {}
        self.changed: set[Key] = set()
        self._queues: defaultdict[str, dict[PortName, Lack]] = defaultdict(dict)
        self._tries: dict[str, int] = {}  # namespace -> how many of its queue to try
        self._freed: set[str] = set()  # namespaces, since the last ``take``

    @property
    def has_tries(self) -> bool:
        """Whether ``take`` may return something."""
        return bool(self._tries or self._freed)

    def set(self, name: PortName, lack: Lack | None) -> None:
        """Set what a service port lacks; None: it fits completely, or is deleted."""
        ports = self.lacks.pop(name.owner, {})
        former = ports.pop(name, None)
        if former:
            self._queues[former.namespace].pop(name, None)
        if lack:
            ports[name] = lack
            self._queues[lack.namespace][name] = lack
        if ports:
            self.lacks[name.owner] = ports
        if (former and former.reason) != (lack and lack.reason):
            self.changed.add(name.owner)

    def lack(self, name: PortName) -> Lack | None:
        """Return what a service port lacks; None if it fits completely."""
        return self.lacks.get(name.owner, {}).get(name)

    def freed(self, namespace: str) -> None:
        """Note that something was freed that this namespace can use, or any."""
        self._freed |= {namespace, EVERYONE}

    def take(self, still_lacks: Callable[[PortName, Lack], object]) -> list[PortName]:
        """Return the service ports to try now, among the next few; the others keep waiting."""
        freed, self._freed = self._freed, set()
        self._tries |= {each: len(self._queues[each]) for each in freed if self._queues.get(each)}
        found: list[PortName] = []
        for namespace, tries in list(self._tries.items()):
            queue = self._queues[namespace]
            tried: list[PortName] = []
            for name in islice(queue, min(tries, MOST_TRIED)):
                if len(found) == MOST_PLANNED:
                    break
                tried.append(name)
                found += [] if still_lacks(name, queue[name]) else [name]
            for name in tried:
                queue[name] = queue.pop(name)  # to the end
            self._tries[namespace] -= len(tried)
            if not queue or not self._tries[namespace]:
                del self._tries[namespace]
        return found


_AT_RANDOM = "its connections go to any endpoint at random"


class Shares(NamedTuple):
    """Limits as parts of a map, from 0 to 1.

    ``namespace``: of each map, for one namespace. ``service_tables``: of the places of map choices,
    for the tables of one Service.
    """

    namespace: float
    service_tables: float = 1 / 8


UNLIMITED = Shares(1.0, 1.0)


class _Backends(NamedTuple):
    """Backends with their ids, and the block of their slots."""

    backends: Sequence[DesiredBackend]
    block: Range
    ids: tuple[int, ...]


class Ahead(NamedTuple):
    """A block whose slots are written before the service port is planned.

    ``former``: what the service port had then.
    """

    service_id: int
    backends: Sequence[DesiredBackend]
    block: Range
    ids: tuple[int, ...]
    former: ServiceEntries


class Space:
    """The allocators of the maps, what each namespace uses, and which service ports wait."""

    def __init__(
        self, capacity: Capacity, frontends: Frontends, ranges: SourceRanges, shares: Shares
    ) -> None:
        self.frontends, self.ranges, self.shares = frontends, ranges, shares
        self.service_ids = IdAllocator(capacity.service_ids)
        self.backend_ids = IdAllocator(capacity.backend_ids)
        self.former_ids = FormerIds(())
        self.slots = SlotAllocator(capacity.slots)
        self.choices = SlotAllocator(capacity.choices)
        self.waiting, self.ahead = Waiting(), dict[PortName, Ahead]()
        self.sizes = {
            "services": capacity.services,
            "service_stats": capacity.service_ids,
            "backend_slots": min(capacity.backend_ids, capacity.endpoints or capacity.backend_ids),
            "slots": capacity.slots,
            "source_ranges": capacity.source_ranges,
            "choices": capacity.choices,
        }
        self._free: dict[str, Callable[[], int]] = {
            "services": lambda: frontends.free,
            "service_stats": lambda: self.service_ids.available,
            "backend_slots": self._free_backends,
            "slots": lambda: self.slots.available,
            "source_ranges": lambda: ranges.free,
            "choices": lambda: self.choices.available,
        }
        self._used: defaultdict[str, Counter[str]] = defaultdict(Counter)  # namespace -> map
        self._tables: Counter[Key] = Counter()  # Service -> places of its tables

    def used_entries(self) -> dict[str, int]:
        """Map -> the number of its used entries, including those in quarantine.

        Another thread may be planning at the same time, so the counts are not of one moment.
        """
        used = {part: self.sizes[part] - free() for part, free in self._free.items()}
        ids = {"backend_slots": len(self.backend_ids), "service_stats": len(self.service_ids)}
        return used | ids | {"cluster_ips": len(self.frontends.cluster_ips.counts)}

    def most(self, part: str) -> int:
        """The number of entries of a map that one namespace may have."""
        return math.ceil(self.sizes[part] * self.shares.namespace)

    def replace(
        self, name: PortName, old: ServiceEntries, new: ServiceEntries
    ) -> Callable[[], None] | None:
        """Replace the service port's entries ``old`` with ``new``.

        Returns a function that ends the quarantine of the entries that the service port gave up, or
        None.
        """
        resting, used = _resting(old, new), self._used[name.namespace]
        before, after = _usage(old) if old.id else _UNUSED, _usage(new)
        for part in before:
            used[part] += after[part] - before[part] + resting[part]
        self._count_tables(name.owner, after["choices"] - before["choices"])
        if any(after[part] < before[part] for part in ("services", "source_ranges")):
            self.waiting.freed(name.namespace)
        return partial(self._end_rest, name.namespace, resting) if any(resting.values()) else None

    def lack(self, name: PortName, part: str, more: int, given_up: int = 0) -> Lack | None:
        """Return what keeps a service port from having ``more`` entries of a map, or None.

        ``given_up``: places of its tables that the service port frees in exchange.
        """
        if more <= 0:
            return None
        size, found = self.sizes[part], partial(Lack, part=part, more=more)
        if more > self._free[part]():
            return found(EVERYONE, reason=f"map {part} is full ({size} entries)")
        if lack := self.lacks_share(name.namespace, part, self._used[name.namespace][part], more):
            return lack
        most, tables_now = int(size * self.shares.service_tables), self._tables[name.owner]
        if part == "choices" and most < tables_now - given_up + more:
            reason = f"the tables of one Service have at most {most} of {size} places of map {part}"
            return found(name.namespace, reason=reason)
        return None

    def lacks_share(self, namespace: str, part: str, used: int, more: int) -> Lack | None:
        """Return a Lack if a namespace that uses so many entries may not have ``more``."""
        most = self.most(part)
        if used + more <= most:
            return None
        share = f"namespace {namespace} already has its share of map {part}"
        reason = f"{share} ({most} of {self.sizes[part]} entries, see --namespace-share)"
        return Lack(namespace, part, more, reason)

    def allocate_ahead(
        self, desired: DesiredService, old: ServiceEntries, known: tuple[int, ...]
    ) -> Ahead | None:
        """Allocate a block for new backends, ``known`` their ids; None if it does not fit."""
        if not old.id and self.lack(desired.name, "service_stats", 1):
            return None
        found = self._allocate_new(desired, old, known, [])
        if found is None:
            return None
        id = old.id or self.service_ids.allocate()
        ahead = self.ahead[desired.name] = Ahead(id, *found, old)
        return ahead

    def fit(
        self, desired: DesiredService, wanted: Mapping[Frontend, Flags], old: ServiceEntries
    ) -> tuple[ServiceEntries | None, Lack | None]:
        """Return the entries that fit, or None, and what the rest lacks."""
        lacks: list[Lack] = []
        frontends = self._fit_frontends(desired.name, wanted, lacks)
        found = self._fit_backends(desired, old, lacks) if frontends else None
        if found is None:
            return None, lacks[0]
        if found.backends is not desired.backends:
            desired = replace(desired, backends=tuple(found.backends))
        table = self._fit_table(desired, frontends, old, lacks, same_block=found.block == old.block)
        if table is None:
            frontends = {f: tables.at_random(flags) for f, flags in frontends.items()}
        ahead = self._ready(desired, old)
        id = old.id or (ahead.service_id if ahead else self.service_ids.allocate())
        new = service_entries(id, desired, frontends, found.block, found.ids, table or NO_TABLE)
        return self._fit_source_ranges(desired.name, new, old, lacks), next(iter(lacks), None)

    def new_table(self, desired: DesiredService, old: ServiceEntries) -> TableKind:
        """Return the kind of a service port's new tables.

        Its size is 0 if no new table is needed.
        """
        scheduler = tables.scheduler_of(next(iter(desired.frontends.values())))
        kind = TableKind(scheduler, _table_size(scheduler, desired.backends), desired.backends)
        if not kind.size:
            return kind
        lacks = self.lack(desired.name, "choices", 2 * kind.size, old.tables.size)
        if lacks or (old.has_backends_of(desired) and _has_table(old, scheduler, kind.size)):
            return kind._replace(size=0)
        return kind

    def free_leftovers(self, contents: MapContents, quarantine: Quarantine) -> None:
        """Free leftover blocks; if a block overlaps one in use, only the rest is freed."""
        leftovers = (
            (self.slots, contents.leftover_blocks),
            (self.choices, contents.leftover_tables),
        )
        for allocator, blocks in leftovers:
            for part in (part for block in blocks for part in allocator.mark_used(block)):
                quarantine.add(partial(allocator.free, part))
        quarantine.add(partial(self.waiting.freed, EVERYONE))

    def _count_tables(self, service: Key, more: int) -> None:
        """Count the places of a Service's tables; a Service without any is not kept."""
        if count := self._tables[service] + more:
            self._tables[service] = count
        else:
            self._tables.pop(service, None)

    def _end_rest(self, namespace: str, resting: Counter[str]) -> None:
        self._used[namespace] -= resting
        self.waiting.freed(namespace)
        if not self._used[namespace]:
            del self._used[namespace]

    def _free_backends(self) -> int:
        used = len(self.backend_ids)
        return min(self.backend_ids.available, self.sizes["backend_slots"] - used)

    def _fit_frontends(
        self, name: PortName, wanted: Mapping[Frontend, Flags], lacks: list[Lack]
    ) -> Mapping[Frontend, Flags]:
        present = {f: flags for f, flags in wanted.items() if self.frontends.has(f)}
        lack = self.lack(name, "services", len(wanted) - len(present))
        lacks += [lack] if lack else []
        return present if lack else wanted

    def _fit_backends(
        self, desired: DesiredService, old: ServiceEntries, lacks: list[Lack]
    ) -> _Backends | None:
        """Return all backends; or those existing and still wanted; or all existing ones."""
        if ahead := self._ready(desired, old):
            return _Backends(ahead.backends, ahead.block, ahead.ids)
        if not old.id:
            if lack := self.lack(desired.name, "service_stats", 1):
                lacks.append(lack)
                return None
            return self._allocate_slots(desired, old, lacks)
        if found := self._allocate_slots(desired, old, lacks):
            return found
        known = zip(desired.backends, finished(old.finding_ids(desired)), strict=True)
        kept = replace(desired, backends=tuple(backend for backend, id in known if id))
        return self._allocate_slots(kept, old, lacks) or _Backends(old.backends, old.block, old.ids)

    def _allocate_slots(
        self, desired: DesiredService, old: ServiceEntries, lacks: list[Lack]
    ) -> _Backends | None:
        if old.has_backends_of(desired):
            return _Backends(desired.backends, old.block, old.ids)
        return self._allocate_new(desired, old, finished(old.finding_ids(desired)), lacks)

    def _ready(self, desired: DesiredService, old: ServiceEntries) -> Ahead | None:
        """Return the block that was written ahead for these backends, if it is still right."""
        ahead = self.ahead.get(desired.name)
        is_right = ahead and ahead.backends is desired.backends and ahead.former.ids is old.ids
        return ahead if is_right else None

    def _allocate_new(
        self, desired: DesiredService, old: ServiceEntries, ids: tuple[int, ...], lacks: list[Lack]
    ) -> _Backends | None:
        name, size = desired.name, len(desired.backends)
        known = self.former_ids.fill(ids, desired.backends)
        lack = self.lack(name, "backend_slots", known.count(0))
        lack = lack or self.lack(name, "slots", size)
        block = None if lack else self.slots.allocate(size)
        if block is None:
            row = f"map slots has no {size} free slots in a row"
            lacks.append(lack or Lack(EVERYONE, "slots", size, row))
            return None
        self.former_ids.take(known)
        ids = tuple([id or self.backend_ids.allocate() for id in known])
        return _Backends(desired.backends, block, ids)

    def _fit_table(
        self,
        desired: DesiredService,
        frontends: Mapping[Frontend, Flags],
        old: ServiceEntries,
        lacks: list[Lack],
        *,
        same_block: bool,
    ) -> Range | None:
        """Return the first of its tables; NO_TABLE: none is needed; None: it does not fit.

        A table is never overwritten: other slots, weights or another scheduler get a new table.
        """
        scheduler = tables.scheduler_of(next(iter(frontends.values())))
        size = _table_size(scheduler, desired.backends)
        if not size:
            return NO_TABLE
        if same_block and old.valid and _has_table(old, scheduler, size):
            return old.valid.table
        lack = self.lack(desired.name, "choices", 2 * size, old.tables.size)
        row = f"map choices has no {2 * size} free places in a row"
        taken = None if lack else self.choices.allocate(2 * size)
        if taken:
            return taken._replace(size=size)
        lack = lack or Lack(EVERYONE, "choices", 2 * size, row)
        lacks.append(lack._replace(reason=f"{lack.reason}: {_AT_RANDOM}"))
        return None

    def _fit_source_ranges(
        self, name: PortName, new: ServiceEntries, old: ServiceEntries, lacks: list[Lack]
    ) -> ServiceEntries:
        """Return the entries with the source ranges that fit."""
        if new.source_ranges <= old.source_ranges:  # nearly all service ports have none
            return new
        more = sorted(new.source_ranges - self.ranges.present, key=str)
        share = self.most("source_ranges")
        room = min(self.ranges.free, share - self._used[name.namespace]["source_ranges"])
        lack = self.lack(name, "source_ranges", len(more))
        if not lack:
            return new
        lacks.append(lack._replace(more=1))
        fitting = (new.source_ranges & self.ranges.present) | frozenset(more[: max(0, room)])
        return new._replace(source_ranges=fitting)


def _table_size(scheduler: str, backends: Sequence[DesiredBackend]) -> int:
    lists = ([each.weight for each in backends if name in each.flags] for name in LISTS)
    return tables.size(scheduler, list(lists))


def _has_table(entries: ServiceEntries, scheduler: str, size: int) -> bool:
    return (entries.scheduler, entries.tables.size) == (scheduler, 2 * size)


def _usage(entries: ServiceEntries) -> dict[str, int]:
    return {
        "services": len(entries.services),
        "service_stats": int(entries.id > 0),
        "backend_slots": len(entries.ids),
        "slots": entries.block.size,
        "source_ranges": len(entries.source_ranges),
        "choices": entries.tables.size,
    }


_UNUSED = _usage(NO_ENTRIES)


def _resting(old: ServiceEntries, new: ServiceEntries) -> Counter[str]:
    """Return the entries that a service port gives up.

    They stay reserved until the quarantine ends.
    """
    if not old.id:
        return Counter()
    return Counter(
        service_stats=int(old.id > new.id),
        backend_slots=len(set(old.ids) - set(new.ids)),
        slots=old.block.size if old.block != new.block else 0,
        choices=old.tables.size if old.tables != new.tables else 0,
        source_ranges=len(old.source_ranges) if new.id and not new.restricted else 0,
    )
