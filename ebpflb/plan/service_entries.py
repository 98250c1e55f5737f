# SPDX-License-Identifier: Apache-2.0
"""One service port as the maps hold it, or as they shall hold it: numbers and all."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpflb.plan.desired_service import DesiredBackend, DesiredService
from ebpflb.plan.entries import Backend, Flags, Frontend, Range, Service, SourceRange
from ebpflb.plan.prefixes import source_range


class ServiceEntries(NamedTuple):
    """What the maps hold of one service port: backends slot by slot, and an id for each."""

    id: int
    block: Range
    services: dict[Frontend, Service]
    backends: tuple[DesiredBackend, ...]
    ids: tuple[int, ...]
    source_ranges: frozenset[SourceRange] = frozenset()

    @property
    def restricted(self) -> bool:
        """Whether anybody asks for the source ranges; if not, there are none."""
        return any("restricted" in service.flags for service in self.services.values())

    def slots(self) -> Iterator[tuple[int, Backend]]:
        """The block, index by index."""
        for slot, (desired, id) in enumerate(zip(self.backends, self.ids, strict=True)):
            backend = Backend(desired.address, desired.port, desired.flags, id, self.id)
            yield self.block.base + slot, backend

    def members(self) -> Iterator[tuple[int, int]]:
        """The slot of each id."""
        return ((id, self.block.base + slot) for slot, id in enumerate(self.ids))

    def has_backends_of(self, desired: DesiredService) -> bool:
        """In the same slots; a backend may have got another name."""
        if self.backends == desired.backends:
            return bool(self.id)
        return bool(self.id) and [b[:3] for b in self.backends] == [b[:3] for b in desired.backends]

    def ids_for(self, desired: DesiredService) -> tuple[int, ...]:
        """A backend keeps its id as long as it belongs to the service; 0 for one that is new."""
        if not self.ids:
            return (0,) * len(desired.backends)
        ids = {b.endpoint: id for b, id in zip(self.backends, self.ids, strict=True)}
        return tuple([ids.get(b.endpoint, 0) for b in desired.backends])


_OPEN, _RESTRICTED = frozenset[str](), frozenset({"restricted"})
NO_ENTRIES = ServiceEntries(0, Range(0, 0), {}, (), ())


def service_entries(
    number: int,
    desired: DesiredService,
    frontends: Mapping[Frontend, Flags],
    block: Range,
    ids: tuple[int, ...],
) -> ServiceEntries:
    """What is desired, with its numbers."""
    services = _services(number, desired, frontends, block)
    new = ServiceEntries(number, block, services, desired.backends, ids)
    return new._replace(source_ranges=source_ranges(number, desired)) if new.restricted else new


def retained_entries(
    old: ServiceEntries,
    own: Iterable[Frontend],
    desired: DesiredService,
    frontends: Mapping[Frontend, Flags],
) -> ServiceEntries | None:
    """What does not fit serves on by its own frontends as it did, if it served.

    But it lets in nobody whom it should not; and frontends that a crash left at other blocks go
    back to the one that was adopted.
    """
    sound = next((s for s in old.services.values() if s.block == old.block), None)
    if sound is None:
        return None
    flags = {f: old.services[f].flags | (frontends.get(f, _OPEN) & _RESTRICTED) for f in own}
    new = old._replace(services={f: sound._replace(frontend=f, flags=flags[f]) for f in flags})
    if not new.restricted:
        return new._replace(source_ranges=frozenset())
    if any(_RESTRICTED & words for words in frontends.values()):
        return new._replace(source_ranges=source_ranges(old.id, desired))
    return new


def source_ranges(number: int, desired: DesiredService) -> frozenset[SourceRange]:
    return frozenset(source_range(network, number) for network in desired.source_ranges)


def _services(
    number: int, desired: DesiredService, frontends: Mapping[Frontend, Flags], block: Range
) -> dict[Frontend, Service]:
    cluster = sum("cluster" in backend.flags for backend in desired.backends)
    local = [index for index, backend in enumerate(desired.backends) if "local" in backend.flags]
    ranges = Range(block.base, cluster), Range(block.base + (local or [0])[0], len(local))
    affinity, slots = desired.affinity_seconds, block.size
    return {
        frontend: Service(frontend, number, flags, affinity, slots, *ranges)
        for frontend, flags in frontends.items()
    }
