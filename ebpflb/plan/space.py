# SPDX-License-Identifier: Apache-2.0
"""How much of a service port fits into the maps, and why the rest does not.

A namespace has at most its share of each map, so one tenant cannot take the space of all others;
what its Services gave up counts until it is out of quarantine. The tables of one Service have a
share of map choices besides.

Each part of a service port fits or does not. Frontends that do not fit are left out. Backends that
do not fit are left out with all new ones; those that the service port has and still wants stay.
Source ranges that do not fit are left out, so a restricted frontend never admits too many clients.
Without a table connections go at random. A new service port without space for its backends is not
programmed.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from ebpflb.model.events import Key
from ebpflb.model.services import PortName
from ebpflb.plan import tables
from ebpflb.plan.allocators import Capacity, FormerIds, IdAllocator, Quarantine, SlotAllocator
from ebpflb.plan.desired import DesiredBackend, DesiredService
from ebpflb.plan.entries import NO_TABLE, Flags, Frontend, Range
from ebpflb.plan.frontends import Frontends, SourceRanges
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.service_entries import LISTS, ServiceEntries, TableKind, in_list, service_entries

# The service ports of which something does not fit, and when each is tried again.
#
# A service port is tried again only after something was freed that it could use, and only a few
# with each plan: however many wait, nobody else's change takes longer.

MOST_TRIED = 64  # with one plan
EVERYONE = ""  # instead of a namespace: what anyone frees can be used


class Lack(NamedTuple):
    """So many entries more of map ``part`` are needed, which ``namespace`` or EVERYONE can free."""

    namespace: str
    part: str
    more: int
    reason: str  # for the operator


class Waiting:
    """``lacks``: the service ports that wait. ``changed``: the Services of which some began or
    ended to wait, or wait for another reason; the reader empties it.
    """

    def __init__(self) -> None:
        self.lacks: dict[PortName, Lack] = {}
        self.of_service: dict[Key, dict[PortName, Lack]] = {}
        self.changed: set[Key] = set()
        self._queues: defaultdict[str, dict[PortName, None]] = defaultdict(dict)
        self._tries: dict[str, int] = {}  # namespace -> how many of its queue are to be tried
        self._freed: set[str] = set()  # namespaces, since the last ``take``

    @property
    def has_tries(self) -> bool:
        """Whether ``take`` may have some to try."""
        return bool(self._tries or self._freed)

    def set(self, name: PortName, lack: Lack | None) -> None:
        """What a service port lacks now; None: everything of it fits, or it is deleted."""
        former = self.lacks.pop(name, None)
        if former:
            self._queues[former.namespace].pop(name, None)
        if lack:
            self.lacks[name] = lack
            self._queues[lack.namespace][name] = None
        if (former and former.reason) != (lack and lack.reason):
            self._note(name, lack)

    def freed(self, namespace: str) -> None:
        """Something was freed that was this namespace's, or no namespace's."""
        self._freed |= {namespace, EVERYONE}

    def take(self, still_lacks: Callable[[PortName, Lack], object]) -> list[PortName]:
        """Those that are to be tried now, of the next few; the others wait on."""
        freed, self._freed = self._freed, set()
        self._tries |= {each: len(self._queues[each]) for each in freed if self._queues.get(each)}
        found: list[PortName] = []
        for namespace, tries in list(self._tries.items()):
            queue = self._queues[namespace]
            tried = list(islice(queue, min(tries, MOST_TRIED)))
            for name in tried:
                queue[name] = queue.pop(name)  # to the end
            found += [name for name in tried if not still_lacks(name, self.lacks[name])]
            self._tries[namespace] -= len(tried)
            if not tried or not self._tries[namespace]:
                del self._tries[namespace]
        return found

    def _note(self, name: PortName, lack: Lack | None) -> None:
        service = service_of(name)
        ports = self.of_service.setdefault(service, {})
        ports.pop(name, None)
        ports |= {name: lack} if lack else {}
        if not ports:
            del self.of_service[service]
        self.changed.add(service)


def service_of(name: PortName) -> Key:
    return Key(name.namespace, name.service)


_AT_RANDOM = "its connections go to any endpoint at random"


class Shares(NamedTuple):
    """Parts of a map, from 0 to 1.

    ``namespace``: of each map, for one namespace. ``service_tables``: of the places of map choices,
    for the tables of one Service.
    """

    namespace: float
    service_tables: float = 1 / 8


UNLIMITED = Shares(1.0, 1.0)


class _Backends(NamedTuple):
    """Backends with their ids, and the block of their slots."""

    backends: tuple[DesiredBackend, ...]
    block: Range
    ids: tuple[int, ...]


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
        self.waiting = Waiting()
        self.sizes = {
            "services": capacity.services,
            "service_stats": capacity.service_ids,
            "backend_slots": capacity.backend_ids,
            "slots": capacity.slots,
            "source_ranges": capacity.source_ranges,
            "choices": capacity.choices,
        }
        self._free: dict[str, Callable[[], int]] = {
            "services": lambda: frontends.free,
            "service_stats": lambda: self.service_ids.available,
            "backend_slots": lambda: self.backend_ids.available,
            "slots": lambda: self.slots.available,
            "source_ranges": lambda: ranges.free,
            "choices": lambda: self.choices.available,
        }
        self._used: defaultdict[str, Counter[str]] = defaultdict(Counter)  # namespace -> map
        self._tables: Counter[Key] = Counter()  # Service -> places of its tables

    def used_entries(self) -> dict[str, int]:
        """Map -> how many of its entries are in use, those in quarantine included.

        Another thread may be planning at the same time: each count is right at some time.
        """
        ids = {"backend_slots": self.backend_ids.used, "service_stats": self.service_ids.used}
        free = ("slots", "choices")
        return {
            "services": len(self.frontends.owners),
            "source_ranges": len(self.ranges.present),
            **{part: self.sizes[part] - self._free[part]() for part in free},
            **{part: len(used) for part, used in ids.items()},
        }

    def most(self, part: str) -> int:
        """How many entries of a map one namespace may have."""
        return math.ceil(self.sizes[part] * self.shares.namespace)

    def used_by(self, namespace: str) -> Mapping[str, int]:
        """Map -> how many of its entries a namespace has, those at rest included."""
        return dict(self._used.get(namespace, {}))

    def replace(
        self, name: PortName, old: ServiceEntries, new: ServiceEntries
    ) -> Callable[[], None] | None:
        """The service port has the entries ``new`` instead of ``old``.

        Returns what ends the rest of the entries that it gave up; None where nothing rests.
        """
        resting, used = _resting(old, new), self._used[name.namespace]
        before, after = _usage(old), _usage(new)
        for part in before:
            used[part] += after[part] - before[part] + resting[part]
        self._tables[service_of(name)] += after["choices"] - before["choices"]
        if any(after[part] < before[part] for part in ("services", "source_ranges")):
            self.waiting.freed(name.namespace)
        return partial(self._end_rest, name.namespace, resting) if +resting else None

    def lack(self, name: PortName, part: str, more: int, given_up: int = 0) -> Lack | None:
        """What keeps a service port from having so many entries more of a map.

        ``given_up``: places of its tables that it gives up for them.
        """
        if more <= 0:
            return None
        size, found = self.sizes[part], partial(Lack, part=part, more=more)
        if more > self._free[part]():
            return found(EVERYONE, reason=f"map {part} is full ({size} entries)")
        most = self.most(part)
        if most < self._used[name.namespace][part] + more:
            share = f"namespace {name.namespace} has its share of map {part}"
            reason = f"{share} ({most} of {size} entries, see --namespace-share)"
            return found(name.namespace, reason=reason)
        most, tables_now = int(size * self.shares.service_tables), self._tables[service_of(name)]
        if part == "choices" and most < tables_now - given_up + more:
            reason = f"the tables of one Service have at most {most} of {size} places of map {part}"
            return found(name.namespace, reason=reason)
        return None

    def fit(
        self, desired: DesiredService, wanted: Mapping[Frontend, Flags], old: ServiceEntries
    ) -> tuple[ServiceEntries | None, Lack | None]:
        """The entries of what fits, and what the rest lacks; None: nothing of it fits."""
        lacks: list[Lack] = []
        frontends = self._fit_frontends(desired.name, wanted, lacks)
        found = self._fit_backends(desired, old, lacks) if frontends else None
        if found is None:
            return None, lacks[0]
        if found.backends is not desired.backends:
            desired = replace(desired, backends=found.backends)
        table = self._fit_table(desired, frontends, old, lacks, same_block=found.block == old.block)
        if table is None:
            frontends = {f: tables.at_random(flags) for f, flags in frontends.items()}
        id = old.id or self.service_ids.allocate()
        new = service_entries(id, desired, frontends, found.block, found.ids, table or NO_TABLE)
        return self._fit_source_ranges(desired.name, new, old, lacks), next(iter(lacks), None)

    def new_table(self, desired: DesiredService, old: ServiceEntries) -> TableKind:
        """What a service port's new tables are to be; of size 0 where it gets none."""
        scheduler = tables.scheduler_of(next(iter(desired.frontends.values())))
        kind = TableKind(scheduler, _table_size(scheduler, desired.backends), desired.backends)
        if not kind.size:
            return kind
        lacks = self.lack(desired.name, "choices", 2 * kind.size, old.tables.size)
        if lacks or (old.has_backends_of(desired) and _has_table(old, scheduler, kind.size)):
            return kind._replace(size=0)
        return kind

    def free_leftovers(self, contents: MapContents, quarantine: Quarantine) -> None:
        """A leftover block may overlap one that is used; only the rest of it is freed."""
        leftovers = (
            (self.slots, contents.leftover_blocks),
            (self.choices, contents.leftover_tables),
        )
        for allocator, blocks in leftovers:
            for part in (part for block in blocks for part in allocator.mark_used(block)):
                quarantine.add(partial(allocator.free, part))
        quarantine.add(partial(self.waiting.freed, EVERYONE))

    def _end_rest(self, namespace: str, resting: Counter[str]) -> None:
        self._used[namespace] -= resting
        self.waiting.freed(namespace)
        if not self._used[namespace]:
            del self._used[namespace]

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
        """All; else those that it has and still wants; else those that it has."""
        if not old.id:
            if lack := self.lack(desired.name, "service_stats", 1):
                lacks.append(lack)
                return None
            return self._allocate(desired, old, lacks)
        if found := self._allocate(desired, old, lacks):
            return found
        known = zip(desired.backends, old.ids_for(desired), strict=True)
        kept = replace(desired, backends=tuple(backend for backend, id in known if id))
        return self._allocate(kept, old, lacks) or _Backends(old.backends, old.block, old.ids)

    def _allocate(
        self, desired: DesiredService, old: ServiceEntries, lacks: list[Lack]
    ) -> _Backends | None:
        if old.has_backends_of(desired):
            return _Backends(desired.backends, old.block, old.ids)
        name, size = desired.name, len(desired.backends)
        known = self.former_ids.fill(old.ids_for(desired), desired.backends)
        lack = self.lack(name, "backend_slots", known.count(0)) or self.lack(name, "slots", size)
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
        """The first of its tables; NO_TABLE: it needs none; None: it needs one that does not fit.

        A table is never overwritten: other slots, weights or another scheduler get a new one.
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
        """The same entries with those source ranges that fit."""
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
    if tables.is_needless(scheduler, [each.weight for each in backends]):
        return 0
    return tables.size(scheduler, [in_list(backends, name) for name in LISTS])


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


def _resting(old: ServiceEntries, new: ServiceEntries) -> Counter[str]:
    """What a service port gives up, and no one gets before its quarantine is over."""
    if not old.id:
        return Counter()
    return Counter(
        service_stats=int(old.id > new.id),
        backend_slots=len(set(old.ids) - set(new.ids)),
        slots=old.block.size if old.block != new.block else 0,
        choices=old.tables.size if old.tables != new.tables else 0,
        source_ranges=len(old.source_ranges) if new.id and not new.restricted else 0,
    )
