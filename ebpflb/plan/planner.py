# SPDX-License-Identifier: Apache-2.0
"""Wanted against present -> Plan: the ordered difference, and nothing that did not change.

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
from ebpflb.plan.admission import Admission
from ebpflb.plan.claims import Claims
from ebpflb.plan.entries import NOWHERE, Flags, Frontend, Prefix
from ebpflb.plan.internal import ClusterIps
from ebpflb.plan.numbers import Full, Ids, Quarantine, Ranges
from ebpflb.plan.plan import Plan
from ebpflb.plan.present import Present
from ebpflb.plan.programmed import NOTHING, Programmed, kept, numbered
from ebpflb.plan.stale import StaleWatch
from ebpflb.plan.wanted import Wanted


class Capacity(NamedTuple):
    """How many entries the maps have."""

    services: int
    slots: int
    service_ids: int
    backend_ids: int
    source_ranges: int


class Planner:
    """Knows what the maps hold and what they should hold; time comes from outside, in seconds."""

    def __init__(self, capacity: Capacity, present: Present | None = None) -> None:
        self.capacity = capacity
        self.claims = Claims()
        self.present: dict[PortName, Programmed] = {}
        self.backends = 0  # of all that is present
        self.unplaced: dict[PortName, str] = {}
        self.service_ids = Ids(capacity.service_ids)
        self.backend_ids = Ids(capacity.backend_ids)
        self.ranges = Ranges(capacity.slots)
        self.quarantine = Quarantine()
        self.holders: dict[Frontend, PortName] = {}
        self.dropped: set[Frontend] = set()
        self.admission = Admission(capacity.source_ranges, self.quarantine)
        self.cluster_ips = ClusterIps()
        self.stale = StaleWatch()
        self.plan = Plan()
        self._adopt(present or Present())

    def change(self, wanted: Mapping[PortName, Wanted | None], now: float) -> Plan:
        """The plan for what these service ports want now (None: gone); others stay as they are."""
        self.quarantine.release(now)
        for name in sorted(self.claims.update(wanted) | self.unplaced.keys()):
            self._settle(name)
        self._gather()
        plan, self.plan, self.dropped = self.plan, Plan(), set()
        return plan

    def complete(self, wanted: Mapping[PortName, Wanted | None], now: float) -> Plan:
        """The plan for the last of all that is wanted: what nobody wanted since the start goes."""
        gone = dict.fromkeys(self.present.keys() - self.claims.wanted.keys())
        return self.change({**gone, **wanted}, now)

    def applied(self, now: float) -> None:
        """The last plan has been carried out: what it freed begins to rest."""
        self.quarantine.rest(now)

    @property
    def span(self) -> dict[Family, Prefix]:
        """Holds all cluster IPs and what ``cover`` was told; write it before the plan it is of.

        NO_PREFIX where there is nothing of a family. It grows only.
        """
        return self.cluster_ips.span.prefixes()

    def cover(self, networks: Iterable[Network]) -> None:
        """These belong to the span too."""
        for network in networks:
            self.cluster_ips.span.add(network)

    def _gather(self) -> None:
        """What only the end of a plan can tell."""
        self.plan.gone_services += sorted(self.dropped, key=str)
        gained, lost = self.cluster_ips.settle()
        self.plan.cluster_ips += [(address, 1) for address in gained]
        self.plan.gone_cluster_ips += lost
        admitted, self.plan.gone_source_ranges = self.admission.settle()
        self.plan.source_ranges = [(range, 1) for range in admitted]

    def _adopt(self, present: Present) -> None:
        self.cluster_ips = ClusterIps(present.cluster_ips)
        self.present = dict(present.programmed)
        for name, programmed in self.present.items():
            self.backends += len(programmed.backends)
            self.service_ids.adopt(programmed.id)
            self.ranges.adopt(programmed.block)
            self.holders.update(dict.fromkeys(programmed.services, name))
            if programmed.restricted:
                self.admission.adopt(programmed.id, programmed.source_ranges)
            for frontend, service in programmed.services.items():
                self.cluster_ips.lead(frontend, service)
            for id in programmed.ids:
                self.backend_ids.adopt(id)
        self._adopt_stray_numbers(present)
        self.dropped = set(present.stray_services)
        self.plan.members += present.wrong_members
        self.admission.adopt_strays(present.stray_source_ranges)

    def _adopt_stray_numbers(self, present: Present) -> None:
        """A stray block may overlap what is used; only what was free is freed again."""
        for block in present.stray_blocks:
            for part in self.ranges.adopt(block):
                self.quarantine.add(partial(self.ranges.give_back, part))
        for number in present.stray_service_ids:
            self.service_ids.adopt(number)
            self._free_service_id(number)
        for number in present.stray_backend_ids:
            self.backend_ids.adopt(number)
            self._free_backend_id(number)

    def _settle(self, name: PortName) -> None:
        self.unplaced.pop(name, None)
        frontends = self.claims.granted(name)
        if not frontends:
            self._retire(name)
            return
        try:
            self._program(self.claims.wanted[name], frontends)
        except Full as full:
            self.unplaced[name] = str(full)
            self._keep(name, frontends)

    def _keep(self, name: PortName, frontends: dict[Frontend, Flags]) -> None:
        old = self.present.get(name, NOTHING)
        own = [frontend for frontend in old.services if self.holders.get(frontend) == name]
        new = kept(old, own, self.claims.wanted[name], frontends)
        if new:
            self._write(name, old, self._admit(name, new))

    def _retire(self, name: PortName) -> None:
        old = self.present.pop(name, None)
        if old is None:
            return
        self.backends -= len(old.backends)
        self._drop(name, old.services)
        self.admission.forget(old.id)
        self._free_block(old, kept=frozenset())
        self._free_service_id(old.id)
        self.stale.turned(name, old, NOTHING)

    def _program(self, wanted: Wanted, frontends: dict[Frontend, Flags]) -> None:
        name = wanted.name
        old = self.present.get(name, NOTHING)
        same = old.has_backends_of(wanted)
        known = old.ids if same else old.ids_for(wanted)
        if not same or frontends.keys() != old.services.keys():
            self._check_room(old, known, frontends)
        block = old.block if same else self.ranges.take(len(wanted.backends))
        number = old.id or self.service_ids.take()
        ids = tuple([id or self.backend_ids.take() for id in known])
        new = self._admit(name, numbered(number, wanted, frontends, block, ids))
        self._write(name, old, new)
        if not same:
            self._free_block(old, kept=frozenset(ids))
            self.stale.turned(name, old, new)

    def _admit(self, name: PortName, new: Programmed) -> Programmed:
        """With the source ranges that fit."""
        fitting = self.admission.fit(new.source_ranges)
        if fitting != new.source_ranges:
            full = f"map source_ranges is full ({self.capacity.source_ranges} entries)"
            self.unplaced.setdefault(name, full)
        return new._replace(source_ranges=fitting)

    def _check_room(
        self, old: Programmed, known: tuple[int, ...], frontends: Iterable[Frontend]
    ) -> None:
        """Raises Full, with the map's name, before anything is taken."""
        entries = sum(f not in self.holders and f not in self.dropped for f in frontends)
        if entries > self.capacity.services - len(self.holders) - len(self.dropped):
            raise Full(f"map services is full ({self.capacity.services} entries)")
        if not old.id and not self.service_ids.free:
            raise Full(f"map service_stats is full ({self.capacity.service_ids} ids)")
        if known.count(0) > self.backend_ids.free:
            raise Full(f"map members is full ({self.capacity.backend_ids} ids)")

    def _write(self, name: PortName, old: Programmed, new: Programmed) -> None:
        self.present[name] = new
        self.backends += len(new.backends) - len(old.backends)
        if new == old and all(self.holders[frontend] == name for frontend in new.services):
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
            if old.services.get(frontend) != service or self.holders.get(frontend) != name:
                self.plan.services.append((frontend, service))
                self.cluster_ips.lead(frontend, service)
        self.admission.change(new.id, new.source_ranges, restricted=new.restricted)
        self._drop(name, old.services.keys() - new.services.keys())
        self.holders.update(dict.fromkeys(new.services, name))
        self.dropped -= new.services.keys()

    def _drop(self, name: PortName, frontends: Iterable[Frontend]) -> None:
        """Those that another service has taken over meanwhile are its own."""
        for frontend in frontends:
            if self.holders.get(frontend) == name:
                del self.holders[frontend]
                self.dropped.add(frontend)
                self.cluster_ips.lead(frontend, None)

    def _free_block(self, old: Programmed, kept: frozenset[int]) -> None:
        self.quarantine.add(partial(self.ranges.give_back, old.block))
        for id in old.ids:
            if id not in kept:
                self._free_backend_id(id)

    def _free_service_id(self, number: int) -> None:
        self.plan.gone_service_names.append(number)
        self.quarantine.add(partial(self.service_ids.give_back, number))

    def _free_backend_id(self, number: int) -> None:
        """Its old slot stays as it was: whoever keeps the backend must not find it there."""
        self.plan.members.append((number, NOWHERE))
        self.plan.gone_backend_names.append(number)
        self.quarantine.add(partial(self.backend_ids.give_back, number))
