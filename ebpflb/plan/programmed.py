# SPDX-License-Identifier: Apache-2.0
"""One service port as the maps hold it, or as they shall hold it: numbers and all."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpflb.plan.entries import Backend, Flags, Frontend, Range, Service, SourceRange
from ebpflb.plan.spans import source_range
from ebpflb.plan.wanted import Wanted, WantedBackend


class Programmed(NamedTuple):
    """What the maps hold of one service port: backends slot by slot, and an id for each."""

    id: int
    block: Range
    services: dict[Frontend, Service]
    backends: tuple[WantedBackend, ...]
    ids: tuple[int, ...]
    source_ranges: frozenset[SourceRange] = frozenset()

    @property
    def restricted(self) -> bool:
        """Whether anybody asks for the source ranges; if not, there are none."""
        return any("restricted" in service.flags for service in self.services.values())

    def slots(self) -> Iterator[tuple[int, Backend]]:
        """The block, index by index."""
        for slot, (wanted, id) in enumerate(zip(self.backends, self.ids, strict=True)):
            backend = Backend(wanted.address, wanted.port, wanted.flags, id, self.id)
            yield self.block.base + slot, backend

    def members(self) -> Iterator[tuple[int, int]]:
        """The slot of each id."""
        return ((id, self.block.base + slot) for slot, id in enumerate(self.ids))

    def has_backends_of(self, wanted: Wanted) -> bool:
        """In the same slots; a backend may have got another name."""
        if self.backends == wanted.backends:
            return bool(self.id)
        return bool(self.id) and [b[:3] for b in self.backends] == [b[:3] for b in wanted.backends]

    def ids_for(self, wanted: Wanted) -> tuple[int, ...]:
        """A backend keeps its id as long as it belongs to the service; 0 for one that is new."""
        if not self.ids:
            return (0,) * len(wanted.backends)
        ids = {b.endpoint: id for b, id in zip(self.backends, self.ids, strict=True)}
        return tuple([ids.get(b.endpoint, 0) for b in wanted.backends])


_OPEN, _RESTRICTED = frozenset[str](), frozenset({"restricted"})
NOTHING = Programmed(0, Range(0, 0), {}, (), ())


def numbered(
    number: int,
    wanted: Wanted,
    frontends: Mapping[Frontend, Flags],
    block: Range,
    ids: tuple[int, ...],
) -> Programmed:
    """What is wanted, with its numbers."""
    services = _services(number, wanted, frontends, block)
    new = Programmed(number, block, services, wanted.backends, ids)
    return new._replace(source_ranges=source_ranges(number, wanted)) if new.restricted else new


def kept(
    old: Programmed, own: Iterable[Frontend], wanted: Wanted, frontends: Mapping[Frontend, Flags]
) -> Programmed | None:
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
        return new._replace(source_ranges=source_ranges(old.id, wanted))
    return new


def source_ranges(number: int, wanted: Wanted) -> frozenset[SourceRange]:
    return frozenset(source_range(network, number) for network in wanted.source_ranges)


def _services(
    number: int, wanted: Wanted, frontends: Mapping[Frontend, Flags], block: Range
) -> dict[Frontend, Service]:
    cluster = sum("cluster" in backend.flags for backend in wanted.backends)
    local = [index for index, backend in enumerate(wanted.backends) if "local" in backend.flags]
    ranges = Range(block.base, cluster), Range(block.base + (local or [0])[0], len(local))
    affinity, slots = wanted.affinity_seconds, block.size
    return {
        frontend: Service(frontend, number, flags, affinity, slots, *ranges)
        for frontend, flags in frontends.items()
    }
