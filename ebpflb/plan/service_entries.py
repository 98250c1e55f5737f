# SPDX-License-Identifier: Apache-2.0
"""The map entries of one service port, with the ids and slots that were allocated for it."""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from operator import eq
from typing import NamedTuple

from msgspec import structs

from ebpflb.entries.services import (
    FIRST_BACKENDS,
    NO_FLAGS,
    NO_TABLE,
    Backend,
    Flags,
    Frontend,
    Range,
    ServiceEntry,
    SourceRange,
    Table,
    Translation,
    source_range_key,
)
from ebpflb.model.addresses import Address, host_port
from ebpflb.model.endpoints import Steps, in_parts
from ebpflb.model.services import PortName
from ebpflb.plan import tables
from ebpflb.plan.desired import DesiredBackend, DesiredService, Lack
from ebpflb.plan.tables import marked, scheduler_of


class TableKind(NamedTuple):
    """Everything that determines a service port's tables, except the place of slots and tables."""

    scheduler: str
    size: int
    backends: Sequence[DesiredBackend]

    def making(self) -> Steps[list["array[int]"]]:
        """Compute the table of each of LISTS, in steps."""
        parts = []
        for name in LISTS:
            found = yield from in_list(self.backends, name)
            parts.append((yield from tables.making(self.scheduler, found, self.size)))
        return parts


MadeTables = tuple[TableKind, list["array[int]"]]


class ServiceEntries(NamedTuple):
    """The map entries of one service port.

    ``backends`` and their ``ids`` are in the order of the slots in ``block``; ``services`` are the
    values in map services, by frontend.
    """

    id: int
    block: Range
    services: dict[Frontend, ServiceEntry]
    backends: Sequence[DesiredBackend]
    ids: tuple[int, ...]
    source_ranges: frozenset[SourceRange] = frozenset()

    @property
    def valid(self) -> ServiceEntry | None:
        """An entry that refers to ``block``.

        After a crash other entries may refer to another block or table.
        """
        base, size = self.block
        found = None
        for service in self.services.values():
            refers = service.slots == size and service.cluster.base == base
            if refers and (found is None or service.table > found.table):
                found = service
        return found

    @property
    def tables(self) -> Range:
        """The range of map choices that the service port has."""
        valid = self.valid
        return valid.tables if valid else NO_TABLE

    @property
    def scheduler(self) -> str:
        valid = self.valid
        return scheduler_of(valid.flags if valid else NO_FLAGS)

    def making_tables(self, made: MadeTables | None = None) -> Steps[list[Table]]:
        """Return the entries of map choices, computed in steps unless ``made`` has them."""
        table = self.valid.table if self.valid else NO_TABLE
        kind = TableKind(self.scheduler, table.size, self.backends)
        if not table.size:
            return []
        parts = made[1] if made and made[0] == kind else (yield from kind.making())
        firsts = count(table.base, table.size)
        return [
            Table(first, tables.in_block(part, self.block.base))
            for first, part in zip(firsts, parts, strict=False)
            if part
        ]

    @property
    def used_lists(self) -> Flags:
        return used_lists(each.flags for each in self.services.values())

    @property
    def restricted(self) -> bool:
        """Whether a frontend is restricted; if none is restricted, there are no source ranges."""
        return any("restricted" in service.flags for service in self.services.values())

    def slots(self) -> Iterator[tuple[int, Backend]]:
        """The entries of map slots."""
        return slots(self.id, self.block.base, self.backends, self.ids)

    def translations(self, but: Set[int] = frozenset()) -> list[Translation]:
        """Return the translations that netfilter needs, except for the ids in ``but``."""
        pairs = zip(self.ids, self.backends, strict=True)
        return [Translation(id, each.address, each.port) for id, each in pairs if id not in but]

    def backend_slots(self) -> Iterator[tuple[int, int]]:
        """The entries of map backend_slots: backend id -> slot."""
        return ((id, self.block.base + slot) for slot, id in enumerate(self.ids))

    def has_backends_of(self, desired: DesiredService) -> bool:
        """Whether the slots can stay unchanged; the names of backends may differ."""
        if not self.id or len(self.backends) != len(desired.backends):
            return False
        return self.backends == desired.backends or all(
            map(eq, map(_slot, self.backends), map(_slot, desired.backends))
        )

    def finding_ids(self, desired: DesiredService) -> Steps[tuple[int, ...]]:
        """Return the id of each desired backend: its former id, or 0 for a new endpoint."""
        if not self.ids:
            return (0,) * len(desired.backends)
        ids, found = dict[tuple[Address, int], int](), list[int]()
        for part, its in zip(in_parts(self.backends), in_parts(self.ids), strict=True):
            ids.update(zip([(each.address, each.port) for each in part], its, strict=True))
            yield len(part)
        for part in in_parts(desired.backends):
            found += [ids.get((each.address, each.port), 0) for each in part]
            yield len(part)
        return tuple(found)


def slots(
    service: int, base: int, backends: Iterable[DesiredBackend], ids: Iterable[int]
) -> Iterator[tuple[int, Backend]]:
    """Yield the entries of map slots for these backends, from ``base`` on."""
    for slot, (each, id) in enumerate(zip(backends, ids, strict=True), base):
        yield slot, Backend(each.address, each.port, each.flags, id, service, each.weight)


LISTS = ("cluster", "local")  # in the order of their tables


def used_lists(frontends: Iterable[Flags]) -> Flags:
    """Return those of LISTS that a policy uses, by the flags of a service port's frontends.

    Clients on this node use the cluster list at external frontends (kube-proxy.md 4.3).
    """
    policies = {("local" in flags, "external" in flags) for flags in frontends}
    cluster = {"cluster"} if policies - {(True, False)} else set()
    local = {"local"} if any(is_local for is_local, _ in policies) else set()
    return frozenset(cluster | local)


def weights(backends: Iterable[DesiredBackend]) -> set[int]:
    """The weights of backends that are in one of LISTS."""
    return {each.weight for each in backends if each.flags & {*LISTS}}


def in_list(backends: Sequence[DesiredBackend], name: str) -> Steps[list[tables.Weighted]]:
    """Return the backends in one of LISTS, for their table, in steps."""
    found = list[tables.Weighted]()
    for part in in_parts(list(enumerate(backends))):
        found += [
            tables.Weighted(index, host_port(each.address, each.port), each.weight)
            for index, each in part
            if name in each.flags
        ]
        yield len(part) // 2
    return found


def _slot(backend: DesiredBackend) -> tuple[Address, int, Flags, int]:
    return backend.address, backend.port, backend.flags, backend.weight


NO_ENTRIES = ServiceEntries(0, Range(0, 0), {}, (), ())


def service_entries(
    service_id: int,
    desired: DesiredService,
    frontends: Mapping[Frontend, Flags],
    block: Range,
    ids: tuple[int, ...],
    table: Range = NO_TABLE,
) -> ServiceEntries:
    """Return the entries for the desired state with these ids, this block and this first table."""
    cluster = sum("cluster" in backend.flags for backend in desired.backends)
    local = [index for index, backend in enumerate(desired.backends) if "local" in backend.flags]
    is_even = table.size > 0 and len(weights(desired.backends)) == 1
    usual = ServiceEntry(
        service_id,
        NO_FLAGS,
        desired.affinity_seconds,
        block.size,
        Range(block.base, cluster),
        Range(block.base + (local or [0])[0], len(local)),
        table,
        ids[:FIRST_BACKENDS],
    )
    services = {
        frontend: usual._replace(flags=marked(flags) if is_even else flags)
        for frontend, flags in frontends.items()
    }
    new = ServiceEntries(service_id, block, services, desired.backends, ids)
    return new._replace(source_ranges=source_ranges(service_id, desired)) if new.restricted else new


def existing(desired: DesiredService, entries: ServiceEntries, lack: Lack) -> DesiredService:
    """Return what is wanted and already in the maps, of the part that ``lack`` names."""
    if lack.part == "services":
        frontends = {f: it for f, it in desired.frontends.items() if f in entries.services}
        is_whole = len(frontends) == len(desired.frontends)
        return desired if is_whole else replace(desired, frontends=frontends, lack=lack)
    known = {each.endpoint for each in entries.backends}
    backends = tuple(each for each in desired.backends if each.endpoint in known)
    is_whole = len(backends) == len(desired.backends)
    return desired if is_whole else replace(desired, backends=backends, lack=lack)


def source_ranges(service_id: int, desired: DesiredService) -> frozenset[SourceRange]:
    return frozenset(source_range_key(each, service_id) for each in desired.source_ranges) | {
        source_range_key(each, service_id, nodeport=True) for each in desired.nodeport_source_ranges
    }


# The growing weights of new endpoints of service ports with a slow start.
#
# An endpoint is new if other endpoints of the service port were already in use when it came. It
# begins with a tenth of its weight, and gets another tenth with each ninth of the time. If no
# endpoint was in use, as at the first start of an agent or of a Service, all begin with the whole
# weight.
#
# After a start of the agent, the endpoints in the maps count as in use before. An endpoint with a
# part of its weight grows on from there, because the weight shows how far it was. An endpoint that
# was not ready and becomes ready again is new.

TENTHS = 10  # from one tenth to the whole


SLOTS_PER_TURN = 131_072  # slots and places of tables that may be rewritten; at least one service


TURN_SECONDS = 1.0


_Endpoint = tuple[Address, int]


class Growth(NamedTuple):
    """How the weights of one service port grow.

    ``seconds`` is the time from the first tenth to the full weight; ``since`` has the start of each
    growing endpoint.
    """

    seconds: float
    used: frozenset[_Endpoint]
    since: Mapping[_Endpoint, float]

    def step(self, endpoint: _Endpoint, now: float) -> int:
        """The number of tenths of the weight in force, from 1 to TENTHS."""
        grown = (now - self.since[endpoint]) / self.seconds * (TENTHS - 1)
        return min(TENTHS, 1 + int(grown + 1e-9))

    def next_step(self, now: float) -> float:
        """When the next weight grows; infinity means never."""
        a_step = self.seconds / (TENTHS - 1)
        times = (since + self.step(at, now) * a_step for at, since in self.since.items())
        return min(times, default=math.inf)


class SlowStarts:
    """Keeps which weights are growing. Times are in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._growths: dict[PortName, Growth] = {}
        self._next: dict[PortName, float] = {}  # when the next weight of a service port grows
        self._order: list[tuple[float, PortName]] = []  # a heap of them, with former ones
        self._not_before = -math.inf

    @property
    def due(self) -> float:
        """When ``take_due`` returns something next; infinity means never without a change."""
        return max(self._first()[0], self._not_before)

    def _first(self) -> tuple[float, PortName | None]:
        while self._order and self._next.get(self._order[0][1]) != self._order[0][0]:
            heappop(self._order)
        return self._order[0] if self._order else (math.inf, None)

    def _grows_at(self, name: PortName, then: float) -> None:
        if self._next.get(name) != then:
            self._next[name] = then
            heappush(self._order, (then, name))

    def forget(self, name: PortName) -> None:
        self._growths.pop(name, None)
        self._next.pop(name, None)

    def applying(
        self, desired: DesiredService, seconds: float, programmed: ServiceEntries, now: float
    ) -> Steps[DesiredService]:
        """Return ``desired`` with the current weights; ``programmed`` is what the maps have."""
        if not seconds:
            self.forget(desired.name)
            return desired
        former = self._growths.get(desired.name) or _from_maps(desired, programmed, seconds, now)
        lists = used_lists(desired.frontends.values())
        backends = {each.endpoint for each in desired.backends if each.flags & lists}
        new = backends - former.used if former.used else set()
        yield len(backends)
        since = {at: then for at, then in former.since.items() if at in backends}
        growth = Growth(seconds, frozenset(backends), since | dict.fromkeys(new, now))
        growing = {at: then for at, then in growth.since.items() if growth.step(at, now) < TENTHS}
        growth = self._growths[desired.name] = growth._replace(since=growing)
        if not growing:
            self._next.pop(desired.name, None)
            return desired
        self._grows_at(desired.name, growth.next_step(now))
        yield len(backends)
        return _weighted(desired, growth, now)

    def take_due(self, cost: Mapping[PortName, ServiceEntries], now: float) -> list[PortName]:
        """Return the service ports whose weights have grown; those that waited longest come first.

        At most SLOTS_PER_TURN slots are rewritten for them in TURN_SECONDS; the others wait.
        """
        if now < self.due:
            return []
        found, budget, self._not_before = list[PortName](), SLOTS_PER_TURN, now + TURN_SECONDS
        while (first := self._first())[0] <= now and (name := first[1]):
            entries = cost.get(name, NO_ENTRIES)
            budget -= entries.block.size + entries.tables.size
            if found and budget < 0:
                break
            found.append(name)
            self._grows_at(name, self._not_before)  # until it is applied
        return found


def _from_maps(
    desired: DesiredService, programmed: ServiceEntries, seconds: float, now: float
) -> Growth:
    """Return the growth of a service port not seen before, by the weights in the maps."""
    whole = {each.endpoint: each.weight for each in desired.backends}
    lists = programmed.used_lists
    used = {each.endpoint: each.weight for each in programmed.backends if each.flags & lists}
    since = {
        at: now - seconds * (max(1, round(TENTHS * weight / whole[at])) - 1) / (TENTHS - 1)
        for at, weight in used.items()
        if weight < whole.get(at, 0)
    }
    return Growth(seconds, frozenset(used), since)


def _weighted(desired: DesiredService, growth: Growth, now: float) -> DesiredService:
    weights = {each.endpoint: each.weight for each in desired.backends}
    parts = {at: max(1, weights[at] * growth.step(at, now) // TENTHS) for at in growth.since}
    backends = (
        structs.replace(each, weight=parts[each.endpoint]) if each.endpoint in parts else each
        for each in desired.backends
    )
    return replace(desired, backends=tuple(backends))
