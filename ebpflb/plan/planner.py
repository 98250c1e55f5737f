# SPDX-License-Identifier: Apache-2.0
"""Desired state against actual state -> Plan: the ordered difference, and nothing else.

Make before break. Slots that a frontend refers to are never overwritten: a service whose backends
change gets a new block of slots, its frontends are switched to it one by one, each atomically, and
the old block is free again after its quarantine. An entry is written before another one refers to
it, and removed after. So a look-up that succeeds before and after an update succeeds during it,
and a crash between any two writes leaves a working state. The same holds for source ranges: those
that admit a client are written before the switch, those that no longer do are removed after it.

A service port that does not fit into the maps keeps what it has and still wants, and loses what it
does not want any more (``Space``); it is listed in ``not_programmed``, and tried again with every
plan. Restrictions hold even then: where source ranges or a restricted service port do not fit, the
frontends admit only the source ranges that do.
"""

from collections.abc import Mapping
from functools import partial

from ebpflb.model.services import PortName
from ebpflb.plan.allocators import Capacity, MapFull, Quarantine
from ebpflb.plan.claims import Claims
from ebpflb.plan.cluster_ips import ClusterIps
from ebpflb.plan.desired_service import DesiredService
from ebpflb.plan.entries import Flags, Frontend, Translation
from ebpflb.plan.frontends import Frontends
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.plan import Plan
from ebpflb.plan.service_entries import (
    NO_ENTRIES,
    BackendChange,
    ServiceEntries,
    retained_entries,
    service_entries,
)
from ebpflb.plan.source_ranges import SourceRanges
from ebpflb.plan.space import Space
from ebpflb.plan.totals import Totals

Desired = Mapping[PortName, DesiredService | None]


class Planner:
    """Keeps the desired and the actual state of all service ports, and plans the difference.

    ``not_programmed``: service port -> which map is full. Times are of a monotonic clock.
    """

    def __init__(self, capacity: Capacity, contents: MapContents | None = None) -> None:
        self.capacity = capacity
        self.claims = Claims()
        self.actual: dict[PortName, ServiceEntries] = {}
        self.totals = Totals()  # of all services in `actual`
        self.not_programmed: dict[PortName, str] = {}
        self.quarantine = Quarantine()
        contents = contents or MapContents()
        self.frontends = Frontends(capacity.services, contents.cluster_ips)
        self.space = Space(capacity, self.frontends)
        self.service_ids, self.backend_ids = self.space.service_ids, self.space.backend_ids
        self.slots, self.waiting = self.space.slots, self.space.waiting
        self.source_ranges = SourceRanges(capacity.source_ranges, self.quarantine)
        self.backend_changes: list[BackendChange] = []
        self.plan = Plan()
        self._load(contents)

    def plan_changes(self, desired: Desired, now: float) -> Plan:
        """The plan after these changes of the desired state; None: the service port is deleted."""
        self.quarantine.release(now)
        names = self.claims.update(desired) | self.not_programmed.keys()
        names |= self.space.tables.take_waiting()
        for name in sorted(names, key=lambda name: (name not in self.waiting, name)):
            self._plan_service(name)
        self._finish()
        plan, self.plan = self.plan, Plan()
        return plan

    def plan_everything(self, desired: Desired, now: float) -> Plan:
        """As ``plan_changes``, after all others: also removes service ports that are no more."""
        deleted = (self.actual.keys() | self.waiting.names()) - self.claims.desired.keys()
        return self.plan_changes({**dict.fromkeys(deleted), **desired}, now)

    def written(self, now: float) -> None:
        """The last plan has been written to the maps: the quarantine of what it freed begins."""
        self.quarantine.start(now)

    def take_backend_changes(self) -> list[BackendChange]:
        """All since the last call; to be called when the plans have been written."""
        changes, self.backend_changes = self.backend_changes, []
        return changes

    @property
    def cluster_ips(self) -> ClusterIps:
        return self.frontends.cluster_ips

    def used_entries(self) -> dict[str, int]:
        """Map -> how many of its entries are in use, those in quarantine included.

        Another thread may be planning at the same time: each count is right at some time.
        """
        return self.space.used_entries() | {
            "source_ranges": len(self.source_ranges.present),
            "cluster_ips": len(self.cluster_ips.counts),
        }

    def _finish(self) -> None:
        """Adds what is known only when all changes of a plan are known."""
        self.plan.removed_services += self.frontends.take_removed()
        added, removed = self.cluster_ips.take_changes()
        self.plan.cluster_ips += [(address, 1) for address in added]
        self.plan.removed_cluster_ips += removed
        ranges, self.plan.removed_source_ranges = self.source_ranges.take_changes()
        self.plan.source_ranges = [(range, 1) for range in ranges]

    def _load(self, contents: MapContents) -> None:
        self.actual = dict(contents.entries)
        for name, entries in self.actual.items():
            self.totals.replace(NO_ENTRIES, entries)
            self.service_ids.mark_used(entries.id)
            self.slots.mark_used(entries.block)
            self.space.tables.choices.mark_used(entries.tables)
            self.frontends.load(name, entries.services)
            if entries.restricted:
                self.source_ranges.load(entries.id, entries.source_ranges)
            self.backend_ids.mark_all_used(entries.ids)
        self._load_leftovers(contents)
        self.frontends.load_leftovers(contents.leftover_services)
        self._load_wrong_backend_slots(dict(contents.wrong_backend_slots))
        self.source_ranges.load_leftovers(contents.leftover_source_ranges)

    def _load_wrong_backend_slots(self, wrong: Mapping[int, int]) -> None:
        """Netfilter does not translate to a backend whose id led nowhere."""
        self.plan.backend_slots += wrong.items()
        for entries in self.actual.values() if wrong else ():
            self.plan.translations += (it for it in entries.translations() if it.id in wrong)

    def _load_leftovers(self, contents: MapContents) -> None:
        self.space.free_leftovers(contents, self.quarantine)
        for id in contents.leftover_service_ids:
            self.service_ids.mark_used(id)
            self._free_service_id(id)
        for id in contents.leftover_backend_ids:
            self.backend_ids.mark_used(id)
            self._free_backend_id(id)
        for translation in contents.leftover_translations:
            self.quarantine.add(partial(self._end_translation, translation))

    def _plan_service(self, name: PortName) -> None:
        self.not_programmed.pop(name, None)
        frontends = self.claims.frontends_of(name)
        if not frontends:
            self._remove(name)
            self.waiting.forget(name)
            return
        old = self.actual.get(name, NO_ENTRIES)
        try:
            self._program(self.claims.desired[name], frontends)
            self.waiting.forget(name)
        except MapFull as full:
            self.not_programmed[name] = str(full)
            if old is not NO_ENTRIES:
                self._reduce(name, frontends)
                self.waiting.reduced(name, old, self.actual.get(name, NO_ENTRIES))

    def _reduce(self, name: PortName, frontends: dict[Frontend, Flags]) -> None:
        """Takes away what the service port does not want any more; gives it what fits."""
        fitting = {f: flags for f, flags in frontends.items() if self.frontends.has(f)}
        try:
            if fitting:
                desired = self.space.reduced(self.claims.desired[name], self.actual[name])
                self._program(desired, fitting)
            else:
                self._remove(name)
        except MapFull:
            self._retain_entries(name, frontends)

    def _retain_entries(self, name: PortName, frontends: dict[Frontend, Flags]) -> None:
        old = self.actual.get(name, NO_ENTRIES)
        own = [frontend for frontend in old.services if self.frontends.owners.get(frontend) == name]
        new = retained_entries(old, own, self.claims.desired[name], frontends)
        if new:
            self._write(name, old, self._fit_source_ranges(name, new))

    def _remove(self, name: PortName) -> None:
        old = self.actual.pop(name, None)
        if old is None:
            return
        self.totals.replace(old, NO_ENTRIES)
        self.frontends.remove(name, old.services)
        self.source_ranges.remove(old.id)
        self._free_block(old, used_ids=frozenset())
        self.quarantine.add(partial(self.space.tables.choices.free, old.tables))
        self._free_service_id(old.id)
        self.backend_changes.append(BackendChange.between(name, old, NO_ENTRIES))

    def _program(self, desired: DesiredService, frontends: dict[Frontend, Flags]) -> None:
        name = desired.name
        old = self.actual.get(name, NO_ENTRIES)
        same_frontends = frontends.keys() == old.services.keys()
        same_block = old.has_backends_of(desired)
        known = old.ids if same_block else old.ids_for(desired)
        if not (same_block and same_frontends):
            self.space.check(name, old, known, frontends)
        block = old.block if same_block else self.slots.allocate(len(desired.backends))
        service_id = old.id or self.service_ids.allocate()
        ids = tuple([id or self.backend_ids.allocate() for id in known])
        found, table = self.space.tables.allocate(desired, frontends, old, same_block=same_block)
        new = service_entries(service_id, desired, found, block, ids, table)
        self._write(name, old, self._fit_source_ranges(name, new))
        if not same_block:
            self._free_block(old, used_ids=frozenset(ids))
        if not (same_block and same_frontends):
            self.backend_changes.append(BackendChange.between(name, old, new))

    def _fit_source_ranges(self, name: PortName, new: ServiceEntries) -> ServiceEntries:
        """The same entries with only the source ranges that fit into the map."""
        fitting = self.source_ranges.fitting(new.source_ranges)
        if fitting != new.source_ranges:
            full = f"map source_ranges is full ({self.capacity.source_ranges} entries)"
            self.not_programmed.setdefault(name, full)
        return new._replace(source_ranges=fitting)

    def _write(self, name: PortName, old: ServiceEntries, new: ServiceEntries) -> None:
        self.actual[name] = new
        self.totals.replace(old, new)
        if self.space.tables.take_wrong(name) or new.has_other_places(old):
            self.plan.choices += new.choices()
        if new == old and all(self.frontends.owners[f] == name for f in new.services):
            return
        if new.block != old.block:
            self.plan.translations += new.translations(but=frozenset(old.ids))
            self.plan.slots += new.slots()
            self.plan.backend_slots += new.backend_slots()
        if new.tables != old.tables:
            self.quarantine.add(partial(self.space.tables.choices.free, old.tables))
        if not old.id:
            self.plan.service_names.append((new.id, name))
        known = {id: backend.name for id, backend in zip(old.ids, old.backends, strict=True)}
        named = ((id, each.name) for id, each in zip(new.ids, new.backends, strict=True))
        self.plan.backend_names += [pair for pair in named if known.get(pair[0]) != pair[1]]
        self.plan.services += self.frontends.change(name, old.services, new.services)
        self.source_ranges.change(new.id, new.source_ranges, restricted=new.restricted)

    def _free_block(self, old: ServiceEntries, used_ids: frozenset[int]) -> None:
        if old.block.size:
            self.quarantine.add(partial(self.slots.free, old.block))
        for translation in old.translations(but=used_ids):
            self._free_backend_id(translation.id)
            self.quarantine.add(partial(self._end_translation, translation))

    def _end_translation(self, translation: Translation) -> None:
        self.plan.removed_translations.append(translation)

    def _free_service_id(self, id: int) -> None:
        self.plan.removed_service_names.append(id)
        self.quarantine.add(partial(self.service_ids.free, id))

    def _free_backend_id(self, id: int) -> None:
        """Clients' affinity to the backend and sockets' assignments to it end with this write: the
        hooks look its slot up by its id, and find that it has none.
        """
        self.plan.removed_backend_slots.append(id)
        self.plan.removed_backend_names.append(id)
        self.quarantine.add(partial(self.backend_ids.free, id))
