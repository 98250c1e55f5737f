# SPDX-License-Identifier: Apache-2.0
"""The actual state at start, read back from the maps, so that a restart writes nothing.

A crash may have left a partly written plan. If the frontends of a service refer to several blocks,
one block is used and the others are leftovers. Frontends whose service has no name, names without
frontends and source ranges of no service are leftovers too. The first complete plan removes them. A
crash never leaves the same backend id twice; if an id occurs twice, the second block counts as
empty.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

from ebpflb.entries.services import (
    NO_SLOT,
    NOT_RECORDED,
    Backend,
    BackendName,
    Frontend,
    LastIds,
    Range,
    ServiceEntry,
    SourceRange,
    Translation,
)
from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName
from ebpflb.plan.desired import DesiredBackend
from ebpflb.plan.service_entries import ServiceEntries

UNKNOWN_NAME = BackendName("", "")


@dataclass
class MapContents:
    """The entries of each service port, and the leftovers that belong to none.

    Leftover entries refer to the leftover blocks and ids, so those go through the quarantine.
    """

    entries: dict[PortName, ServiceEntries] = field(default_factory=dict)
    leftover_services: list[Frontend] = field(default_factory=list)
    leftover_service_ids: set[int] = field(default_factory=set)
    leftover_backend_ids: set[int] = field(default_factory=set)
    leftover_translations: list[Translation] = field(default_factory=list)
    # In force, but not in these maps: programs with another layout choose them.
    former_translations: list[Translation] = field(default_factory=list)
    leftover_blocks: set[Range] = field(default_factory=set)
    leftover_tables: set[Range] = field(default_factory=set)
    leftover_source_ranges: list[SourceRange] = field(default_factory=list)
    cluster_ips: set[Address] = field(default_factory=set)
    last_ids: LastIds = NOT_RECORDED
    # the entries of backend_slots that must be written
    wrong_backend_slots: list[tuple[int, int]] = field(default_factory=list)

    def frontends(self) -> Iterator[Frontend]:
        """All frontends of map services."""
        yield from self.leftover_services
        for entries in self.entries.values():
            yield from entries.services


class Slots(Protocol):
    """Map slots."""

    def owners(self, block: Range) -> list[tuple[int, int]]:
        """Return backend id and service id of each slot; 0 and 0 if no agent has written it."""

    def read(self, block: Range) -> list[Backend]:
        """Return the content of each slot."""


class StoredBackends(Sequence[DesiredBackend]):
    """The backends of a block, read when they are first used.

    A new agent plans one service port after the other, and keeps the backends that the cluster asks
    for, not these. If it read all of these at once, Python would never give their memory back.
    """

    __slots__ = ("_block", "_names", "_read", "_slots")

    def __init__(self, block: Range, slots: Slots, names: Mapping[int, BackendName]) -> None:
        self._block, self._slots, self._names = block, slots, names
        self._read: tuple[DesiredBackend, ...] | None = None

    def _all(self) -> tuple[DesiredBackend, ...]:
        if self._read is None:
            name = self._names.get
            self._read = tuple(
                DesiredBackend(*each[:3], name(each.id, UNKNOWN_NAME), each.weight)
                for each in self._slots.read(self._block)
            )
        return self._read

    def __len__(self) -> int:
        return self._block.size

    def __getitem__(self, at: Any) -> Any:
        return self._all()[at]

    def __iter__(self) -> Iterator[DesiredBackend]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == other


def read_back(
    services: Iterable[tuple[Frontend, ServiceEntry]],
    slots: Slots,
    backend_slots: Callable[[int], int],
    service_names: Mapping[int, PortName],
    backend_names: Mapping[int, BackendName],
    source_ranges: Iterable[SourceRange] = (),
    cluster_ips: Iterable[Address] = (),
) -> MapContents:
    """Sort the entries of the maps by service port.

    ``slots`` and ``backend_names`` are read again until the first complete plan.
    """
    by_id: dict[int, dict[Frontend, ServiceEntry]] = defaultdict(dict)
    for frontend, service in services:
        by_id[service.id][frontend] = service
    ranges_of: dict[int, set[SourceRange]] = defaultdict(set)
    for range in source_ranges:
        ranges_of[range.service].add(range)
    contents = MapContents(cluster_ips=set(cluster_ips))
    used: set[int] = set()
    for service_id, name in service_names.items():
        if name in contents.entries:
            contents.leftover_service_ids.add(service_id)
        else:
            found = _service_entries(service_id, by_id[service_id], slots, backend_names)
            if len(set(found.ids)) < len(found.ids) or not used.isdisjoint(found.ids):
                found = found._replace(block=Range(0, 0), backends=(), ids=())
            used.update(found.ids)
            if found.restricted:
                found = found._replace(source_ranges=frozenset(ranges_of.pop(service_id, ())))
            contents.entries[name] = found
            contents.leftover_blocks |= {s.block for s in found.services.values()} - {found.block}
            contents.leftover_tables |= {s.tables for s in found.services.values()} - {found.tables}
            _check_backend_slots(contents, found, backend_slots)
    _find_leftovers(contents, by_id, ranges_of, backend_names)
    contents.leftover_translations = _translations(contents, slots, backend_slots)
    return contents


def _translations(
    contents: MapContents,
    slots: Slots,
    backend_slots: Callable[[int], int],
) -> list[Translation]:
    return [
        Translation(id, backend.address, backend.port)
        for id in contents.leftover_backend_ids
        if (slot := backend_slots(id)) != NO_SLOT
        for backend in slots.read(Range(slot, 1))
        if backend.id == id
    ]


def _service_entries(
    service_id: int,
    services: dict[Frontend, ServiceEntry],
    slots: Slots,
    backend_names: Mapping[int, BackendName],
) -> ServiceEntries:
    """Return the entries of one service with its largest block.

    Every referenced block is complete.
    """
    blocks = (service.block for service in services.values())
    block = max(blocks, key=attrgetter("size"), default=Range(0, 0))
    found = slots.owners(block)
    if any(owner != service_id for _, owner in found):
        found, block = [], Range(0, 0)
    backends = StoredBackends(block, slots, backend_names) if found else ()
    return ServiceEntries(service_id, block, services, backends, tuple([id for id, _ in found]))


def _check_backend_slots(
    contents: MapContents, found: ServiceEntries, backend_slots: Callable[[int], int]
) -> None:
    """Note wrong entries of map backend_slots.

    The slot that one refers to stays until it is corrected.
    """
    for id, slot in found.backend_slots():
        written = backend_slots(id)
        if written != slot:
            contents.wrong_backend_slots.append((id, slot))
            contents.leftover_blocks.add(Range(written, 1))


def _find_leftovers(
    contents: MapContents,
    by_id: Mapping[int, dict[Frontend, ServiceEntry]],
    ranges_of: Mapping[int, set[SourceRange]],
    backend_names: Mapping[int, BackendName],
) -> None:
    known = {entries.id for entries in contents.entries.values()}
    for service_id, services in by_id.items():
        if service_id not in known:
            contents.leftover_service_ids.add(service_id)
            contents.leftover_services += services
            contents.leftover_blocks |= {service.block for service in services.values()}
            contents.leftover_tables |= {service.tables for service in services.values()}
    contents.leftover_service_ids |= ranges_of.keys() - known
    contents.leftover_source_ranges += [range for ranges in ranges_of.values() for range in ranges]
    used = {id for entries in contents.entries.values() for id in entries.ids}
    contents.leftover_backend_ids |= backend_names.keys()
    contents.leftover_backend_ids -= used | {0}
