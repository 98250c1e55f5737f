# SPDX-License-Identifier: Apache-2.0
"""Desired state against actual state -> Plan: the ordered difference, and nothing else.

A live range of slots is never written. A service whose backends change gets a new block; its
frontends flip to it one by one, each atomically; the old block rests in quarantine and is then
free. Before a service is named everything it names is there, and a removed frontend goes before
what it named. So a look-up that succeeds before and after an update succeeds during it, and a
crash between any two writes leaves a working state. A client's right to a restricted frontend is
looked up like that too: what lets it in is there before the flip, what no longer does goes after.

A service that does not fit keeps its last good state, is named in ``unplaced``, and is tried
again with every plan. But whoever is not to be let in is not: where source ranges do not fit, or
what is restricted does not, the frontends are restricted to those that do.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

from ebpflb.model.addresses import Family, Network
from ebpflb.model.services import PortName
from ebpflb.plan.allocators import IdAllocator, MapFull, Quarantine, SlotAllocator
from ebpflb.plan.claims import Claims
from ebpflb.plan.cluster_ips import ClusterIps
from ebpflb.plan.desired_service import DesiredService
from ebpflb.plan.entries import NOWHERE, Flags, Frontend, Prefix
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.plan import Plan
from ebpflb.plan.service_entries import (
    NO_ENTRIES,
    ServiceEntries,
    retained_entries,
    service_entries,
)
from ebpflb.plan.source_ranges import SourceRanges
from ebpflb.plan.stale import StaleWatch


class Capacity(NamedTuple):
    """How many entries the maps have."""

    services: int
    slots: int
    service_ids: int
    backend_ids: int
    source_ranges: int


class Planner:
    """Knows what the maps hold and what they should hold; time comes from outside, in seconds."""

    def __init__(self, capacity: Capacity, contents: MapContents | None = None) -> None:
        self.capacity = capacity
        self.claims = Claims()
        self.actual: dict[PortName, ServiceEntries] = {}
        self.backends = 0  # of all services in `actual`
        self.unplaced: dict[PortName, str] = {}
        self.service_ids = IdAllocator(capacity.service_ids)
        self.backend_ids = IdAllocator(capacity.backend_ids)
        self.slots = SlotAllocator(capacity.slots)
        self.quarantine = Quarantine()
        self.owners: dict[Frontend, PortName] = {}
        self.removed: set[Frontend] = set()
        self.source_ranges = SourceRanges(capacity.source_ranges, self.quarantine)
        self.cluster_ips = ClusterIps()
        self.stale = StaleWatch()
        self.plan = Plan()
        self._load(contents or MapContents())

    def change(self, desired: Mapping[PortName, DesiredService | None], now: float) -> Plan:
        """The plan for what these service ports want now (None: gone); others stay as they are."""
        self.quarantine.release(now)
        for name in sorted(self.claims.update(desired) | self.unplaced.keys()):
            self._plan_service(name)
        self._finish()
        plan, self.plan, self.removed = self.plan, Plan(), set()
        return plan

    def complete(self, desired: Mapping[PortName, DesiredService | None], now: float) -> Plan:
        """The plan for the last of all services: what nobody desired since the start is removed."""
        gone = dict.fromkeys(self.actual.keys() - self.claims.desired.keys())
        return self.change({**gone, **desired}, now)

    def applied(self, now: float) -> None:
        """The last plan has been carried out: what it freed begins to rest."""
        self.quarantine.start(now)

    @property
    def covering_prefixes(self) -> dict[Family, Prefix]:
        """Holds all cluster IPs and what ``cover`` was told; write it before the plan it is of.

        NO_PREFIX where there is nothing of a family. It grows only.
        """
        return self.cluster_ips.prefixes.by_family()

    def cover(self, networks: Iterable[Network]) -> None:
        """These belong to the span too."""
        for network in networks:
            self.cluster_ips.prefixes.add(network)

    def _finish(self) -> None:
        """What only the end of a plan can tell."""
        self.plan.removed_services += sorted(self.removed, key=str)
        added, removed = self.cluster_ips.take_changes()
        self.plan.cluster_ips += [(address, 1) for address in added]
        self.plan.removed_cluster_ips += removed
        admitted, self.plan.removed_source_ranges = self.source_ranges.take_changes()
        self.plan.source_ranges = [(range, 1) for range in admitted]

    def _load(self, contents: MapContents) -> None:
        self.cluster_ips = ClusterIps(contents.cluster_ips)
        self.actual = dict(contents.entries)
        for name, entries in self.actual.items():
            self.backends += len(entries.backends)
            self.service_ids.mark_used(entries.id)
            self.slots.mark_used(entries.block)
            self.owners.update(dict.fromkeys(entries.services, name))
            if entries.restricted:
                self.source_ranges.load(entries.id, entries.source_ranges)
            for frontend, service in entries.services.items():
                self.cluster_ips.point(frontend, service)
            for id in entries.ids:
                self.backend_ids.mark_used(id)
        self._load_leftovers(contents)
        self.removed = set(contents.leftover_services)
        self.plan.members += contents.wrong_members
        self.source_ranges.load_leftovers(contents.leftover_source_ranges)

    def _load_leftovers(self, contents: MapContents) -> None:
        """A stray block may overlap what is used; only what was free is freed again."""
        for block in contents.leftover_blocks:
            for part in self.slots.mark_used(block):
                self.quarantine.add(partial(self.slots.free, part))
        for number in contents.leftover_service_ids:
            self.service_ids.mark_used(number)
            self._free_service_id(number)
        for number in contents.leftover_backend_ids:
            self.backend_ids.mark_used(number)
            self._free_backend_id(number)

    def _plan_service(self, name: PortName) -> None:
        self.unplaced.pop(name, None)
        frontends = self.claims.frontends_of(name)
        if not frontends:
            self._remove(name)
            return
        try:
            self._program(self.claims.desired[name], frontends)
        except MapFull as full:
            self.unplaced[name] = str(full)
            self._retain(name, frontends)

    def _retain(self, name: PortName, frontends: dict[Frontend, Flags]) -> None:
        old = self.actual.get(name, NO_ENTRIES)
        own = [frontend for frontend in old.services if self.owners.get(frontend) == name]
        new = retained_entries(old, own, self.claims.desired[name], frontends)
        if new:
            self._write(name, old, self._fit_source_ranges(name, new))

    def _remove(self, name: PortName) -> None:
        old = self.actual.pop(name, None)
        if old is None:
            return
        self.backends -= len(old.backends)
        self._remove_frontends(name, old.services)
        self.source_ranges.remove(old.id)
        self._free_block(old, kept=frozenset())
        self._free_service_id(old.id)
        self.stale.turned(name, old, NO_ENTRIES)

    def _program(self, desired: DesiredService, frontends: dict[Frontend, Flags]) -> None:
        name = desired.name
        old = self.actual.get(name, NO_ENTRIES)
        same = old.has_backends_of(desired)
        known = old.ids if same else old.ids_for(desired)
        if not same or frontends.keys() != old.services.keys():
            self._check_capacity(old, known, frontends)
        block = old.block if same else self.slots.allocate(len(desired.backends))
        number = old.id or self.service_ids.allocate()
        ids = tuple([id or self.backend_ids.allocate() for id in known])
        new = self._fit_source_ranges(name, service_entries(number, desired, frontends, block, ids))
        self._write(name, old, new)
        if not same:
            self._free_block(old, kept=frozenset(ids))
            self.stale.turned(name, old, new)

    def _fit_source_ranges(self, name: PortName, new: ServiceEntries) -> ServiceEntries:
        """With the source ranges that fit."""
        fitting = self.source_ranges.fitting(new.source_ranges)
        if fitting != new.source_ranges:
            full = f"map source_ranges is full ({self.capacity.source_ranges} entries)"
            self.unplaced.setdefault(name, full)
        return new._replace(source_ranges=fitting)

    def _check_capacity(
        self, old: ServiceEntries, known: tuple[int, ...], frontends: Iterable[Frontend]
    ) -> None:
        """Raises MapFull, with the map's name, before anything is taken."""
        entries = sum(f not in self.owners and f not in self.removed for f in frontends)
        if entries > self.capacity.services - len(self.owners) - len(self.removed):
            raise MapFull(f"map services is full ({self.capacity.services} entries)")
        if not old.id and not self.service_ids.available:
            raise MapFull(f"map service_stats is full ({self.capacity.service_ids} ids)")
        if known.count(0) > self.backend_ids.available:
            raise MapFull(f"map members is full ({self.capacity.backend_ids} ids)")

    def _write(self, name: PortName, old: ServiceEntries, new: ServiceEntries) -> None:
        self.actual[name] = new
        self.backends += len(new.backends) - len(old.backends)
        if new == old and all(self.owners[frontend] == name for frontend in new.services):
            return
        if new.block != old.block:
            self.plan.slots += new.slots()
            self.plan.members += new.members()
        if not old.id:
            self.plan.service_names.append((new.id, name))
        known = {id: backend.name for id, backend in zip(old.ids, old.backends, strict=True)}
        for id, backend in zip(new.ids, new.backends, strict=True):
            if known.get(id) != backend.name:
                self.plan.backend_names.append((id, backend.name))
        for frontend, service in new.services.items():
            if old.services.get(frontend) != service or self.owners.get(frontend) != name:
                self.plan.services.append((frontend, service))
                self.cluster_ips.point(frontend, service)
        self.source_ranges.change(new.id, new.source_ranges, restricted=new.restricted)
        self._remove_frontends(name, old.services.keys() - new.services.keys())
        self.owners.update(dict.fromkeys(new.services, name))
        self.removed -= new.services.keys()

    def _remove_frontends(self, name: PortName, frontends: Iterable[Frontend]) -> None:
        """Those that another service has taken over meanwhile are its own."""
        for frontend in frontends:
            if self.owners.get(frontend) == name:
                del self.owners[frontend]
                self.removed.add(frontend)
                self.cluster_ips.point(frontend, None)

    def _free_block(self, old: ServiceEntries, kept: frozenset[int]) -> None:
        self.quarantine.add(partial(self.slots.free, old.block))
        for id in old.ids:
            if id not in kept:
                self._free_backend_id(id)

    def _free_service_id(self, number: int) -> None:
        self.plan.removed_service_names.append(number)
        self.quarantine.add(partial(self.service_ids.free, number))

    def _free_backend_id(self, number: int) -> None:
        """Its old slot stays as it was: whoever keeps the backend must not find it there."""
        self.plan.members.append((number, NOWHERE))
        self.plan.removed_backend_names.append(number)
        self.quarantine.add(partial(self.backend_ids.free, number))
