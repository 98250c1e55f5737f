# SPDX-License-Identifier: Apache-2.0
"""The map entries of one service port, with the ids and slots that were allocated for it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpflb.model.services import PortName
from ebpflb.plan.desired_service import DesiredBackend, DesiredService
from ebpflb.plan.entries import Backend, Flags, Frontend, Range, ServiceEntry, SourceRange
from ebpflb.plan.prefixes import source_range


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
    def restricted(self) -> bool:
        """Whether a frontend is restricted; if none is, there are no source ranges."""
        return any("restricted" in service.flags for service in self.services.values())

    def slots(self) -> Iterator[tuple[int, Backend]]:
        """The entries of map slots."""
        for slot, (desired, id) in enumerate(zip(self.backends, self.ids, strict=True)):
            backend = Backend(desired.address, desired.port, desired.flags, id, self.id)
            yield self.block.base + slot, backend

    def backend_slots(self) -> Iterator[tuple[int, int]]:
        """The entries of map backend_slots: backend id -> slot."""
        return ((id, self.block.base + slot) for slot, id in enumerate(self.ids))

    def has_backends_of(self, desired: DesiredService) -> bool:
        """Whether the slots can stay as they are; the names of backends may differ."""
        if self.backends == desired.backends:
            return bool(self.id)
        return bool(self.id) and [b[:3] for b in self.backends] == [b[:3] for b in desired.backends]

    def ids_for(self, desired: DesiredService) -> tuple[int, ...]:
        """The id of each desired backend: that of the same endpoint before, or 0 for a new one."""
        if not self.ids:
            return (0,) * len(desired.backends)
        ids = {b.endpoint: id for b, id in zip(self.backends, self.ids, strict=True)}
        return tuple([ids.get(b.endpoint, 0) for b in desired.backends])


class BackendChange(NamedTuple):
    """A service port got other backends or frontends.

    The ids of its backends before and after, () where it has none.
    """

    name: PortName
    former_ids: tuple[int, ...]
    new_ids: tuple[int, ...]


_NO_FLAGS, _RESTRICTED = frozenset[str](), frozenset({"restricted"})
NO_ENTRIES = ServiceEntries(0, Range(0, 0), {}, (), ())


def service_entries(
    service_id: int,
    desired: DesiredService,
    frontends: Mapping[Frontend, Flags],
    block: Range,
    ids: tuple[int, ...],
) -> ServiceEntries:
    """The entries for the desired state, with these ids and this block."""
    services = _services(service_id, desired, frontends, block)
    new = ServiceEntries(service_id, block, services, desired.backends, ids)
    return new._replace(source_ranges=source_ranges(service_id, desired)) if new.restricted else new


def retained_entries(
    old: ServiceEntries,
    own: Iterable[Frontend],
    desired: DesiredService,
    frontends: Mapping[Frontend, Flags],
) -> ServiceEntries | None:
    """The last good entries of a service port whose desired state does not fit; None: it has none.

    ``own`` are the frontends that it still has. Those that are to be restricted become so even
    now; those that refer to another block since a crash refer to ``old.block`` again.
    """
    valid = next((s for s in old.services.values() if s.block == old.block), None)
    if valid is None:
        return None
    flags_of = {f: old.services[f].flags | (frontends.get(f, _NO_FLAGS) & _RESTRICTED) for f in own}
    new = old._replace(
        services={f: valid._replace(frontend=f, flags=flags_of[f]) for f in flags_of}
    )
    if not new.restricted:
        return new._replace(source_ranges=frozenset())
    if any(_RESTRICTED & flags for flags in frontends.values()):
        return new._replace(source_ranges=source_ranges(old.id, desired))
    return new


def source_ranges(service_id: int, desired: DesiredService) -> frozenset[SourceRange]:
    return frozenset(source_range(each, service_id) for each in desired.source_ranges) | {
        source_range(each, service_id, nodeport=True) for each in desired.nodeport_source_ranges
    }


def _services(
    service_id: int, desired: DesiredService, frontends: Mapping[Frontend, Flags], block: Range
) -> dict[Frontend, ServiceEntry]:
    cluster = sum("cluster" in backend.flags for backend in desired.backends)
    local = [index for index, backend in enumerate(desired.backends) if "local" in backend.flags]
    ranges = Range(block.base, cluster), Range(block.base + (local or [0])[0], len(local))
    affinity, slots = desired.affinity_seconds, block.size
    return {
        frontend: ServiceEntry(frontend, service_id, flags, affinity, slots, *ranges)
        for frontend, flags in frontends.items()
    }
