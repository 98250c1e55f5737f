# SPDX-License-Identifier: Apache-2.0
"""The maps as plain dicts, and an oracle that looks things up in them as the datapath does.

They include the elements of netfilter's table: the destination of a packet for which a backend was
chosen.
"""

import copy
from collections.abc import Iterable, Iterator, Set
from dataclasses import fields, replace
from ipaddress import IPv6Address
from itertools import product
from typing import Any, NamedTuple

from ebpflb.entries.services import (
    NO_SLOT,
    NOT_RECORDED,
    Backend,
    BackendName,
    Choice,
    Flags,
    Frontend,
    LastIds,
    Range,
    ServiceEntry,
    SourceRange,
    Translation,
)
from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName
from ebpflb.plan.map_contents import MapContents, read_back
from ebpflb.plan.planner import NOT_IN_MAPS, Plan

ZERO = Backend(IPv6Address(0), 0, frozenset(), 0, 0)  # an element that was never written

Write = tuple[str, Any]
Backends = tuple[Backend, ...]
Rights = Set[tuple[tuple[Frontend, Address], bool]]


class WrongLookup(AssertionError):
    """A look-up found an entry that it must not find."""


Drawn = tuple[tuple[Backend, Backend, int], ...]


class Found(NamedTuple):
    """Everything that a look-up of a frontend can find."""

    flags: Flags
    affinity_seconds: int
    cluster: Backends
    local: Backends
    block: Backends
    drawn: tuple[Drawn, ...]  # of the cluster list's table, and of the local list's


class NamedBackend(NamedTuple):
    """A backend without its ids, which depend on history."""

    address: Address
    port: int
    flags: Flags
    name: BackendName | None


def writes(plan: Plan) -> Iterator[Write]:
    """Return the single writes of a plan in the documented order, except that netfilter's part
    comes first: MapWriter gives it to NetfilterSync in one piece. An id may be added and removed in
    one plan.
    """
    yield from (("last_ids", row) for row in plan.last_ids)
    new = {each.id for each in plan.translations}
    yield from (("translations", row) for row in plan.translations)
    yield from (
        ("removed_translations", row) for row in plan.removed_translations if row.id not in new
    )
    for part in fields(plan):
        if part.name == "tables":
            yield from (("choices", row) for table in plan.tables for row in table.rows())
        elif part.name not in NOT_IN_MAPS:
            for row in getattr(plan, part.name):
                yield part.name, row


def translation(backend: Backend) -> Translation:
    """Return the address to which netfilter must send packets for a backend."""
    return Translation(backend.id, backend.address, backend.port)


def matches(range: SourceRange, service: int, client: Address) -> bool:
    """Whether the longest-prefix match applies: first to the bits of the service, then to those of
    the address, with IPv4 as v4-mapped IPv6.
    """
    difference = _bits(range.service, range.address) ^ _bits(service, client)
    return not range.nodeport and difference >> (64 + 128 - range.length) == 0


def _bits(service: int, address: Address) -> int:
    mapped = 0xFFFF << 32 if address.version == 4 else 0
    return service << (128 + 32) | mapped | int(address)


class Maps:
    """The content of pinned maps, with or without an agent."""

    def __init__(self) -> None:
        self.services: dict[Frontend, ServiceEntry] = {}
        self.slots: dict[int, Backend] = {}
        self.backend_slots: dict[int, int] = {}
        self.choices: dict[int, Choice] = {}
        self.service_names: dict[int, PortName] = {}
        self.backend_names: dict[int, BackendName] = {}
        self.source_ranges: dict[SourceRange, int] = {}
        self.cluster_ips: dict[Address, int] = {}
        self.translations: dict[int, Translation] = {}
        self.settings: dict[int, LastIds] = {}

    def copy(self) -> "Maps":
        twin = Maps()
        vars(twin).update({part: copy.copy(entries) for part, entries in vars(self).items()})
        return twin

    def write(self, part: str, row: Any) -> None:
        if part == "last_ids":
            self.settings[0] = row
            return
        entries = getattr(self, part.removeprefix("removed_"))
        if part == "removed_backend_slots":
            entries[row] = NO_SLOT
        elif part.startswith("removed_"):
            entries.pop(row.id if isinstance(row, Translation) else row, None)
        else:
            entries.update([(row.id, row) if isinstance(row, Translation) else row])

    def write_all(self, plan: Plan) -> None:
        for part, row in writes(plan):
            self.write(part, row)

    def read_back(self) -> MapContents:
        contents = read_back(
            self.services.items(),
            self,
            lambda number: self.backend_slots.get(number, 0),
            dict(self.service_names),
            dict(self.backend_names),
            self.source_ranges,
            self.cluster_ips,
        )
        return replace(contents, last_ids=self.settings.get(0, NOT_RECORDED))

    def owners(self, block: Range) -> list[tuple[int, int]]:
        return [(each.id, each.service) for each in self.read(block)]

    def read(self, block: Range) -> list[Backend]:
        return [self.slots.get(block.base + at, ZERO) for at in range(block.size)]

    def backends(self, service: ServiceEntry, run: Range) -> Backends:
        """Read the backends at each index of a range like backend_read: every slot must name the
        service.
        """
        found = tuple(self.read(run))
        if any(backend.service != service.id for backend in found):
            raise WrongLookup(f"service {service.id} reads {found}")
        return found

    def drawn(self, service: ServiceEntry) -> tuple[Drawn, ...]:
        """Check the backends in each place of each table: all of its list, and no others."""
        found = []
        lists = zip(("cluster", "local"), (service.cluster, service.local), strict=True)
        for part, (word, listed) in enumerate(lists):
            first = service.table.base + part * service.table.size
            places = [
                self.choices[first + at] for at in range(service.table.size * (listed.size > 0))
            ]
            named = {slot for place in places for slot in place[:2]}
            drawn = [self.slots.get(slot, ZERO) for slot in named]
            if any(word not in it.flags or it.service != service.id for it in drawn):
                raise WrongLookup(f"service {service.id} draws {places} for its {word} list")
            found.append(tuple((self.slots[a], self.slots[b], below) for a, b, below in places))
        return tuple(found)

    def find(self, service: int, number: int) -> Backend | None:
        """Find a backend like backend_find, which affinity and datagram flows use."""
        found = self.slots.get(self.backend_slots.get(number, 0), ZERO)
        return found if (found.service, found.id) == (service, number) else None

    def wanted_translations(self) -> dict[int, Translation]:
        """Return the translations that an agent compares with netfilter's table."""
        pairs = ((id, self.slots.get(slot, ZERO)) for id, slot in self.backend_slots.items())
        return {id: translation(backend) for id, backend in pairs if backend.id == id}

    def is_translated(self, backend: Backend) -> bool:
        """Whether netfilter sends a packet for which this backend was chosen to the backend."""
        return self.translations.get(backend.id) == translation(backend)

    def lookup(self, frontend: Frontend) -> Found:
        service = self.services[frontend]
        block = self.backends(service, service.block)
        cluster = self.backends(service, service.cluster)
        local = self.backends(service, service.local)
        for word, listed in (("cluster", cluster), ("local", local)):
            if listed != tuple(backend for backend in block if word in backend.flags):
                raise WrongLookup(f"service {service.id}: its {word} list is {listed} of {block}")
        drawn = self.drawn(service)
        return Found(service.flags, service.affinity_seconds, cluster, local, block, drawn)

    def lookups(self) -> dict[Frontend, Found]:
        """Return the service and backends of each frontend.

        Raises WrongLookup for slots of another service.
        """
        return {frontend: self.lookup(frontend) for frontend in self.services}

    def admitted(self, frontend: Frontend, client: Address) -> bool:
        """Whether a client may use a frontend."""
        return self.admits(self.services[frontend], client)

    def admits(self, service: ServiceEntry, client: Address) -> bool:
        """Whether a service, read at any time, admits the client, like policy_admits in C."""
        restricted = "restricted" in service.flags
        return not restricted or any(matches(it, service.id, client) for it in self.source_ranges)

    def rights(self, clients: Iterable[Address]) -> Rights:
        """Return whether each of these clients may use each frontend."""
        pairs = product(self.services, clients)
        return {((frontend, client), self.admitted(frontend, client)) for frontend, client in pairs}

    def view(self) -> dict[Frontend, tuple[Any, ...]]:
        """Return the look-ups without ids, to compare with maps written in other steps."""
        return {
            frontend: (
                found.flags,
                found.affinity_seconds,
                self._ranges(self.services[frontend]),
                *map(self._named, (found.cluster, found.local, found.block)),
                tuple(
                    (*self._named(place[:2]), place[2]) for part in found.drawn for place in part
                ),
            )
            for frontend, found in self.lookups().items()
        }

    def live_backends(self) -> dict[tuple[int, int], Backend]:
        """Return all backends in blocks that frontends refer to, by service id and backend id."""
        return {
            (backend.service, backend.id): backend
            for found in self.lookups().values()
            for backend in found.block
        }

    def _ranges(self, service: ServiceEntry) -> set[tuple[int, Address]]:
        """Return the ranges of slots that are looked up."""
        ranges = self.source_ranges if "restricted" in service.flags else ()
        return {(it.length, it.address) for it in ranges if it.service == service.id}

    def _named(self, backends: Backends) -> list[NamedBackend]:
        return [
            NamedBackend(b.address, b.port, b.flags, self.backend_names.get(b.id)) for b in backends
        ]
