# SPDX-License-Identifier: Apache-2.0
"""The map entries of one service port, with the ids and slots that were allocated for it."""

import math
from array import array
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from msgspec import structs

from ebpflb.model.addresses import Address
from ebpflb.model.annotations import HASHING
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan import tables
from ebpflb.plan.desired import DesiredBackend, DesiredService
from ebpflb.plan.entries import (
    NO_TABLE,
    Backend,
    Flags,
    Frontend,
    Range,
    ServiceEntry,
    SourceRange,
    Table,
    Translation,
    host_port,
    source_range_key,
)
from ebpflb.plan.flow_entries import StaleCandidates
from ebpflb.plan.tables import marked, scheduler_of


class TableKind(NamedTuple):
    """What the tables of a service port depend on, but where its slots and its places are."""

    scheduler: str
    size: int
    backends: tuple[DesiredBackend, ...]

    def making(self) -> Generator[None, None, list["array[int]"]]:
        """Makes the table of each of LISTS, in steps."""
        parts = []
        for name in LISTS:
            found = in_list(self.backends, name)
            parts.append((yield from tables.making(self.scheduler, found, self.size)))
        return parts


class MadeTables(NamedTuple):
    kind: TableKind
    parts: list["array[int]"]


class ServiceEntries(NamedTuple):
    """``backends`` and their ``ids`` are in the order of the slots in ``block``.

    ``services`` are the values in map services, by frontend.
    """

    id: int
    block: Range
    services: dict[Frontend, ServiceEntry]
    backends: tuple[DesiredBackend, ...]
    ids: tuple[int, ...]
    source_ranges: frozenset[SourceRange] = frozenset()

    @property
    def valid(self) -> ServiceEntry | None:
        """One that refers to ``block``: after a crash others may not, nor to the same tables."""
        found = (service for service in self.services.values() if service.block == self.block)
        return max(found, key=lambda service: service.table, default=None)

    @property
    def tables(self) -> Range:
        """All that the service port has of map choices."""
        valid = self.valid
        return valid.tables if valid else NO_TABLE

    @property
    def scheduler(self) -> str:
        valid = self.valid
        return scheduler_of(valid.flags if valid else _NO_FLAGS)

    @property
    def is_weighted(self) -> bool:
        """Whether it goes by weights that differ: if it does not hash, no other needs a table."""
        if not self.tables.size:
            return False
        return self.scheduler not in HASHING or len(weights(self.backends)) > 1

    def making_tables(self, made: MadeTables | None = None) -> Generator[None, None, list[Table]]:
        """Makes the entries of map choices in steps, unless they are ``made``."""
        table = self.valid.table if self.valid else NO_TABLE
        kind = TableKind(self.scheduler, table.size, self.backends)
        if not table.size:
            return []
        parts = made.parts if made and made.kind == kind else (yield from kind.making())
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
        """Whether a frontend is restricted; if none is, there are no source ranges."""
        return any("restricted" in service.flags for service in self.services.values())

    def slots(self) -> Iterator[tuple[int, Backend]]:
        """The entries of map slots."""
        for slot, (desired, id) in enumerate(zip(self.backends, self.ids, strict=True)):
            where = desired.address, desired.port, desired.flags
            yield self.block.base + slot, Backend(*where, id, self.id, desired.weight)

    def translations(self, but: Set[int] = frozenset()) -> list[Translation]:
        """What netfilter needs for the backends; without those with these ids."""
        pairs = zip(self.ids, self.backends, strict=True)
        return [Translation(id, each.address, each.port) for id, each in pairs if id not in but]

    def backend_slots(self) -> Iterator[tuple[int, int]]:
        """The entries of map backend_slots: backend id -> slot."""
        return ((id, self.block.base + slot) for slot, id in enumerate(self.ids))

    def has_backends_of(self, desired: DesiredService) -> bool:
        """Whether the slots can stay as they are; the names of backends may differ."""
        if self.backends == desired.backends:
            return bool(self.id)
        return bool(self.id) and [*map(_slot, self.backends)] == [*map(_slot, desired.backends)]

    def ids_for(self, desired: DesiredService) -> tuple[int, ...]:
        """The id of each desired backend: that of the same endpoint before, or 0 for a new one."""
        if not self.ids:
            return (0,) * len(desired.backends)
        ids = {b.endpoint: id for b, id in zip(self.backends, self.ids, strict=True)}
        return tuple([ids.get(b.endpoint, 0) for b in desired.backends])


LISTS = ("cluster", "local")  # in the order of their tables


def used_lists(frontends: Iterable[Flags]) -> Flags:
    """Those of LISTS that some policy uses, by the flags of a service port's frontends.

    Clients on this node choose from the cluster list at external ones (kube-proxy.md 4.3).
    """
    policies = {("local" in flags, "external" in flags) for flags in frontends}
    cluster = {"cluster"} if policies - {(True, False)} else set()
    local = {"local"} if any(is_local for is_local, _ in policies) else set()
    return frozenset(cluster | local)


def weights(backends: Iterable[DesiredBackend]) -> set[int]:
    """Of those that are in one of LISTS."""
    return {each.weight for each in backends if each.flags & {*LISTS}}


def in_list(backends: Sequence[DesiredBackend], name: str) -> list[tables.Weighted]:
    """The backends of one of LISTS, for their table."""
    return [
        tables.Weighted(index, host_port(each.address, each.port), each.weight)
        for index, each in enumerate(backends)
        if name in each.flags
    ]


def _slot(backend: DesiredBackend) -> tuple[Address, int, Flags, int]:
    return backend.address, backend.port, backend.flags, backend.weight


class BackendChange(NamedTuple):
    """A service port got other backends or frontends.

    The ids of its backends before and after, () where it has none. ``candidates``: UDP connections
    that may lead elsewhere than to its backends now; none where no backend serves.
    """

    name: PortName
    former_ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    candidates: frozenset[StaleCandidates] = frozenset()

    @classmethod
    def between(cls, name: PortName, old: ServiceEntries, new: ServiceEntries) -> "BackendChange":
        may_be_stale = _candidates(old, new) if name.protocol == Protocol.UDP and new.ids else ()
        return cls(name, old.ids, new.ids, frozenset(may_be_stale))


def _candidates(old: ServiceEntries, new: ServiceEntries) -> Iterator[StaleCandidates]:
    """Of a frontend that was not served before, connections may lead anywhere."""
    kept = set(new.ids)
    gone = [b.endpoint for b, id in zip(old.backends, old.ids, strict=True) if id not in kept]
    for frontend in new.services:
        is_known = old.ids and frontend in old.services
        for backend in gone if is_known else [None]:
            yield StaleCandidates(frontend, backend)


_NO_FLAGS = frozenset[str]()
NO_ENTRIES = ServiceEntries(0, Range(0, 0), {}, (), ())


def service_entries(
    service_id: int,
    desired: DesiredService,
    frontends: Mapping[Frontend, Flags],
    block: Range,
    ids: tuple[int, ...],
    table: Range = NO_TABLE,
) -> ServiceEntries:
    """The entries for the desired state, with these ids, this block and its first table."""
    services = _services(service_id, desired, frontends, block, table)
    new = ServiceEntries(service_id, block, services, desired.backends, ids)
    return new._replace(source_ranges=source_ranges(service_id, desired)) if new.restricted else new


def source_ranges(service_id: int, desired: DesiredService) -> frozenset[SourceRange]:
    return frozenset(source_range_key(each, service_id) for each in desired.source_ranges) | {
        source_range_key(each, service_id, nodeport=True) for each in desired.nodeport_source_ranges
    }


def _services(
    service_id: int,
    desired: DesiredService,
    frontends: Mapping[Frontend, Flags],
    block: Range,
    table: Range,
) -> dict[Frontend, ServiceEntry]:
    cluster = sum("cluster" in backend.flags for backend in desired.backends)
    local = [index for index, backend in enumerate(desired.backends) if "local" in backend.flags]
    ranges = Range(block.base, cluster), Range(block.base + (local or [0])[0], len(local))
    affinity, slots = desired.affinity_seconds, block.size
    is_even = table.size > 0 and len(weights(desired.backends)) == 1
    return {
        frontend: ServiceEntry(
            service_id,
            marked(flags) if is_even else flags,
            affinity,
            slots,
            *ranges,
            table,
        )
        for frontend, flags in frontends.items()
    }


# What all service ports that are in the maps have together.


class Totals:
    """Counted as they change, so that nobody goes through all of them.

    ``schedulers``: by the scheduler in force, how many service ports; ``weighted``: how many go by
    weights that differ.
    """

    def __init__(self) -> None:
        self.backends = 0
        self.schedulers = Counter[str]()
        self.weighted = 0

    def replace(self, old: ServiceEntries, new: ServiceEntries) -> None:
        """What one had, and has now; NO_ENTRIES where it was not there, or has gone."""
        self.backends += len(new.backends) - len(old.backends)
        for entries, one in ((old, -1), (new, 1)):
            if entries is not NO_ENTRIES:
                self.schedulers[entries.scheduler] += one
                self.weighted += one * entries.is_weighted


# The weights of endpoints that are new to a service port with a slow start, as time goes on.
#
# An endpoint is new where others of the service port were in use already when it came. It begins
# with a tenth of its weight, and gets another tenth with each ninth of the time. Where nothing was
# in use, as at the first start of an agent or of a Service, all begin with the whole.
#
# What was in use before an agent's start is what the maps hold: an endpoint with a part of its
# weight goes on from there, for the weight says how far it was. An endpoint that was not ready and
# comes back is new.

TENTHS = 10  # from a tenth to the whole


SLOTS_PER_TURN = 131_072  # slots and places of tables that are written anew; at least one service


TURN_SECONDS = 1.0


_Endpoint = tuple[Address, int]


class Growth(NamedTuple):
    """Of one service port: in how many seconds weights grow, and since when those that do."""

    seconds: float
    used: frozenset[_Endpoint]
    since: Mapping[_Endpoint, float]

    def step(self, endpoint: _Endpoint, now: float) -> int:
        """From 1 to TENTHS: so many tenths of the weight."""
        grown = (now - self.since[endpoint]) / self.seconds * (TENTHS - 1)
        return min(TENTHS, 1 + int(grown + 1e-9))

    def next_step(self, now: float) -> float:
        """When the next weight grows; infinity: none does."""
        a_step = self.seconds / (TENTHS - 1)
        times = (since + self.step(at, now) * a_step for at, since in self.since.items())
        return min(times, default=math.inf)


class SlowStarts:
    """Times are in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._growths: dict[PortName, Growth] = {}
        self._next: dict[PortName, float] = {}  # when the next weight of a service port grows
        self._not_before = -math.inf

    @property
    def due(self) -> float:
        """When ``take_due`` returns something; infinity: never, as it is."""
        return max(min(self._next.values(), default=math.inf), self._not_before)

    def forget(self, name: PortName) -> None:
        self._growths.pop(name, None)
        self._next.pop(name, None)

    def apply(
        self, desired: DesiredService, seconds: float, programmed: ServiceEntries, now: float
    ) -> DesiredService:
        """With the weights that its backends have now; ``programmed``: what the maps hold of it."""
        if not seconds:
            self.forget(desired.name)
            return desired
        former = self._growths.get(desired.name) or _from_maps(desired, programmed, seconds, now)
        lists = used_lists(desired.frontends.values())
        backends = {each.endpoint for each in desired.backends if each.flags & lists}
        new = backends - former.used if former.used else set()
        since = {at: then for at, then in former.since.items() if at in backends}
        growth = Growth(seconds, frozenset(backends), since | dict.fromkeys(new, now))
        growing = {at: then for at, then in growth.since.items() if growth.step(at, now) < TENTHS}
        growth = self._growths[desired.name] = growth._replace(since=growing)
        self._next[desired.name] = growth.next_step(now)
        if not growing:
            del self._next[desired.name]
        return _weighted(desired, growth, now)

    def take_due(self, cost: Mapping[PortName, ServiceEntries], now: float) -> list[PortName]:
        """Whose weights are to be applied anew, those first that have waited longest.

        No more than SLOTS_PER_TURN are rewritten for them in TURN_SECONDS: the rest waits.
        """
        if now < self.due:
            return []
        found: list[PortName] = []
        left = SLOTS_PER_TURN
        for then, name in sorted((then, name) for name, then in self._next.items()):
            entries = cost.get(name, NO_ENTRIES)
            left -= entries.block.size + entries.tables.size
            if then > now or (found and left < 0):
                break
            found.append(name)
        self._not_before = now + TURN_SECONDS
        return found


def desired_in_force(desired: DesiredService, former: DesiredService | None) -> DesiredService:
    """With the weights of the former backends: to compare everything else."""
    weights = {each.endpoint: each.weight for each in former.backends} if former else {}
    return _with_weights(desired, weights)


def _from_maps(
    desired: DesiredService, programmed: ServiceEntries, seconds: float, now: float
) -> Growth:
    """Of a service port that was not seen before: by the weights in the maps."""
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
    return _with_weights(desired, parts)


def _with_weights(desired: DesiredService, weights: Mapping[_Endpoint, int]) -> DesiredService:
    if not weights:
        return desired
    backends = [_with_weight(each, weights.get(each.endpoint)) for each in desired.backends]
    return replace(desired, backends=tuple(backends))


def _with_weight(backend: DesiredBackend, weight: int | None) -> DesiredBackend:
    return backend if weight is None else structs.replace(backend, weight=weight)
