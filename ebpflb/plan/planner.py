# SPDX-License-Identifier: Apache-2.0
"""Compare desired with actual state and return the ordered difference, a Plan.

Make before break. Slots that a frontend refers to are never overwritten: a service whose backends
change gets a new block of slots, its frontends are switched to the block one by one, each
atomically, and the old block is free again after its quarantine. An entry is written before another
entry refers to it, and removed after. So a look-up that succeeds before and after an update also
succeeds during the update, and a crash between any two writes leaves a working state. Source ranges
follow the same order: those that admit a client are written before the switch, those that no longer
admit any are removed after it.

If a service port does not fit, its existing entries stay as far as they are still wanted, and
unwanted ones are freed. The service port waits until something that it could use is freed
(``Space``, ``Waiting``).
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import add, gt, sub
from typing import Any

from ebpflb.entries.services import (
    Backend,
    BackendName,
    Choice,
    Flags,
    Frontend,
    LastIds,
    ServiceEntry,
    SourceRange,
    Table,
    Translation,
)
from ebpflb.model.addresses import Address
from ebpflb.model.endpoints import IN_A_STEP, Steps, finished, in_parts
from ebpflb.model.events import Key
from ebpflb.model.services import PortName, ServicePort
from ebpflb.plan import tables
from ebpflb.plan.allocators import Capacity, FormerIds, Quarantine
from ebpflb.plan.canary import is_canary
from ebpflb.plan.desired import LIMIT, NOTHING, DesiredBackend, DesiredService, Lack, Size
from ebpflb.plan.frontends import ClusterIps, Frontends, SourceRanges
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.service_entries import NO_ENTRIES, MadeTables, ServiceEntries, slots
from ebpflb.plan.space import EVERYONE, UNLIMITED, Ahead, Shares, Space
from ebpflb.plan.stale import Removal, removals

# A plan says what to write into the maps, and in which order. Making a plan writes nothing.

TRANSLATIONS = ("translations", "removed_translations")
NOT_IN_MAPS = ("last_ids", *TRANSLATIONS)  # the parts that are in no map of their own


@dataclass
class Plan:
    """The writes, made field after field in this order.

    New entries come first, then frontends, then the removal of entries without references.

    Ports that a cluster IP does not have are refused. So a cluster IP is in the maps only while all
    its frontends are: another proxy may have served it before, and may serve it afterwards.
    """

    # Into the settings, before an id is used for the first time; one row if ids were given.
    last_ids: list[LastIds] = field(default_factory=list)
    # For the netfilter engine: backend id, and the address and port of its endpoint.
    translations: list[Translation] = field(default_factory=list)
    slots: list[tuple[int, Backend]] = field(default_factory=list)
    backend_slots: list[tuple[int, int]] = field(default_factory=list)  # backend id, slot
    tables: list[Table] = field(default_factory=list)  # new ones, in map choices
    choices: list[tuple[int, Choice]] = field(default_factory=list)  # corrections of wrong entries
    service_names: list[tuple[int, PortName]] = field(default_factory=list)
    backend_names: list[tuple[int, BackendName]] = field(default_factory=list)
    source_ranges: list[tuple[SourceRange, int]] = field(default_factory=list)
    services: list[tuple[Frontend, ServiceEntry]] = field(default_factory=list)
    cluster_ips: list[tuple[Address, int]] = field(default_factory=list)
    removed_cluster_ips: list[Address] = field(default_factory=list)
    removed_services: list[Frontend] = field(default_factory=list)
    removed_source_ranges: list[SourceRange] = field(default_factory=list)
    removed_service_names: list[int] = field(default_factory=list)
    # From this write on, clients' affinity and sockets' assignments to the backend end.
    removed_backend_slots: list[int] = field(default_factory=list)
    removed_backend_names: list[int] = field(default_factory=list)
    # After the quarantine of the id.
    removed_translations: list[Translation] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def __str__(self) -> str:
        """Return the number of rows of each part."""
        return str({name: len(rows) for name, rows in self.parts()})

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Yield the parts that have something to write, by name, in their order."""
        return ((name, rows) for name, rows in vars(self).items() if rows)


# Which service port gets a frontend that several service ports claim: that of the oldest Service.
#
# Two Services may list the same external address, protocol and port. kube-proxy leaves the winner
# undefined (kube-proxy.md 4). Here the older Service wins, and between equally old ones the first
# by name. So a new Service cannot take traffic away, and the order of events does not matter.
# If one of them has no age, as manifests need none, the Service that has the frontend keeps it.
# Services may share an address at different ports: then any of them may stand for it as a whole.


_NO_AGE = "}"  # after all times, before the canary's


class Claims:
    """The desired state of all service ports; each desired frontend is a claim to it.

    ``holder`` returns the service port that has a frontend now.
    """

    def __init__(self, holder: Callable[[Frontend], PortName | None] = lambda _: None) -> None:
        self._holder = holder
        self.desired: dict[PortName, DesiredService] = {}
        self.claimants: dict[Frontend, list[PortName]] = {}
        # The frontends that several claim; the winner comes first.
        self.contested: dict[Frontend, list[PortName]] = {}
        self.wanted: dict[str, Size] = {}  # namespace -> the size of all its service ports
        self.withheld: dict[PortName, Collection[Frontend]] = {}  # because API servers have them

    def update(self, changes: Mapping[PortName, DesiredService | None]) -> set[PortName]:
        """Apply changes; return the service ports whose frontends may have changed.

        None as desired state means the service port is deleted.
        """
        affected = set(changes)
        for name, desired in changes.items():
            affected |= self._withdraw(name)
            if desired is not None:
                affected |= self._claim(desired)
        return affected

    def frontends_of(self, name: PortName) -> dict[Frontend, Flags]:
        """Return the frontends that a service port claims and gets."""
        desired = self.desired.get(name)
        frontends = desired.frontends.items() if desired else ()
        return {f: flags for f, flags in frontends if self.claimants[f][0] == name}

    def _withdraw(self, name: PortName) -> set[PortName]:
        former = self.desired.pop(name, None)
        self.withheld.pop(name, None)
        if former:
            self._count(name.namespace, former.size, -1)
        rivals: set[PortName] = set()
        for frontend in former.frontends if former else ():
            names = self.claimants[frontend]
            names.remove(name)
            rivals.update(names[:1])
            if len(names) < 2:
                self.contested.pop(frontend, None)
            if not names:
                del self.claimants[frontend]
        return rivals

    def _claim(self, desired: DesiredService) -> set[PortName]:
        self.desired[desired.name] = desired
        self._count(desired.name.namespace, desired.size, 1)
        if desired.withheld:
            self.withheld[desired.name] = desired.withheld.keys()
        rivals: set[PortName] = set()
        for frontend in desired.frontends:
            names = self.claimants.setdefault(frontend, [])
            rivals.update(names[:1])
            insort(names, desired.name, key=partial(self._seniority, frontend))
            if len(names) > 1 and frontend.port:
                self._let_keep(frontend, names)
                self.contested[frontend] = names
        return rivals

    def _let_keep(self, frontend: Frontend, names: list[PortName]) -> None:
        """Put the current holder first, unless both ages are known.

        The canary keeps nothing: every Service comes before it.
        """
        holder = self._holder(frontend)
        held = self.desired.get(holder) if holder and holder != names[0] else None
        if not (holder and held) or frontend not in held.frontends or is_canary(holder):
            return
        if not (held.created and self.desired[names[0]].created):
            names.remove(holder)
            names.insert(0, holder)

    def _count(self, namespace: str, size: Size, sign: int) -> None:
        """Count a service port's size; a namespace without any is not kept."""
        before = self.wanted.pop(namespace, NOTHING)
        now = Size(*(had + sign * its for had, its in zip(before, size, strict=True)))
        if any(now):
            self.wanted[namespace] = now

    def _seniority(self, frontend: Frontend, name: PortName) -> tuple[bool, str, PortName]:
        """Return the order: for an address as a whole, those with endpoints come first."""
        desired = self.desired[name]
        is_idle = not frontend.port and not desired.serves(frontend)
        return is_idle, desired.created or _NO_AGE, name


Desired = Mapping[PortName, DesiredService | None]
MOST_FREED = 1024  # backends that one plan removes from the maps: some 10 ms


class Planner:
    """Keeps the desired and the actual state of all service ports, and plans the difference.

    Times are in seconds of a monotonic clock.
    """

    def __init__(
        self, capacity: Capacity, contents: MapContents | None = None, shares: Shares = UNLIMITED
    ) -> None:
        self.capacity = capacity
        self.actual: dict[PortName, ServiceEntries] = {}
        self.backends = 0  # of all services in ``actual``
        self.quarantine = Quarantine()
        contents = contents or MapContents()
        self.frontends = Frontends(capacity.services, contents.cluster_ips)
        self.claims = Claims(self.frontends.owners.get)
        self.source_ranges = SourceRanges(capacity.source_ranges, self.quarantine)
        self.space = Space(capacity, self.frontends, self.source_ranges, shares)
        self.service_ids, self.backend_ids = self.space.service_ids, self.space.backend_ids
        self.slots, self.waiting = self.space.slots, self.space.waiting
        self.former_ids = self.space.former_ids = FormerIds(contents.former_translations)
        self.removals: list[Removal] = []  # the next result of ``take_removals``
        self.changed: dict[PortName, ServiceEntries] = {}  # as they were before, for the history
        self._made: dict[PortName, MadeTables] = {}  # tables made ahead for the next plan
        self._admitted: dict[str, Size] = {}  # namespace -> what it wants, with the next plan
        self._ahead = Plan()
        self._freed: deque[Translation] = deque()  # of backends to be removed, a few with each plan
        self._again: set[Key] = set()  # the next result of ``take_again``
        self._last_ids = contents.last_ids  # as written
        self.plan = Plan()
        self._load(contents)

    def plan_changes(self, desired: Desired, now: float) -> Plan:
        """Return the plan for these changes of the desired state.

        None as desired state means the service port is deleted.
        """
        self.quarantine.release(now)
        wanted = self.claims.wanted
        before = {name.namespace: wanted.get(name.namespace, NOTHING) for name in desired}
        names = self.claims.update(desired)
        self._admitted.clear()
        for namespace, size in before.items():
            if any(map(gt, size, wanted.get(namespace, NOTHING))):
                self.waiting.freed(namespace)
        for name in self.waiting.take(lambda *it: it[0] in names or self._still_lacks(*it)):
            if (lack := self.waiting.lack(name)) and self._is_not_made(name, lack):
                self._again.add(name.owner)
            else:
                names.add(name)
        for name in sorted(names):
            self._plan_service(name)
        self._finish()
        plan, self.plan = self.plan, Plan()
        return plan

    def entries(self, name: PortName) -> ServiceEntries:
        """Return the entries of a service port in the maps; NO_ENTRIES if it has none."""
        return self.actual.get(name, NO_ENTRIES)

    def holder(self, frontend: Frontend) -> PortName | None:
        """Return the service port that has a frontend in the maps."""
        return self.frontends.owners.get(frontend)

    def lacks(self, name: PortName) -> str:
        """Return what keeps a service port from fitting completely; "" if it fits."""
        lack = self.waiting.lack(name)
        return lack.reason if lack else ""

    def knows_backend(self, id: int | None) -> bool:
        """Whether a backend has this id, or it is in quarantine."""
        return id in self.backend_ids

    def admit(self, port: ServicePort, endpoints: int) -> Lack | None:
        """Return what keeps a service port from being made, or None.

        A namespace may want no more than its share: beyond it nothing is made, however much a
        Service asks for.
        """
        namespace, former = port.name.namespace, self.claims.desired.get(port.name)
        size, had = Size(port.frontend_count, endpoints), former.size if former else NOTHING
        more = Size(*map(sub, size, had))
        wanted = self._admitted.get(namespace) or self.claims.wanted.get(namespace, NOTHING)
        for part, used, each in zip(Size._fields, wanted, more, strict=True):
            if each > 0 and (lack := self.space.lacks_share(namespace, part, used, each)):
                return lack
        self._admitted[namespace] = Size(*map(add, wanted, more))
        return None

    def plan_everything(
        self, desired: Desired, now: float, but: Container[Key] = frozenset()
    ) -> Plan:
        """Like ``plan_changes``, for the complete desired state of all Services ``but`` these.

        Also removes deleted service ports.
        """
        unknown = self.actual.keys() - self.claims.desired.keys()
        deleted = (name for name in unknown if name.owner not in but)
        return self.plan_changes({**dict.fromkeys(deleted), **desired}, now)

    def preparing(self, desired: DesiredService) -> Steps[None]:
        """Do in steps what takes long in the service port's next plan: large tables and blocks.

        What ``take_ahead`` returns is to be written after each step. Without these steps the plan
        does all at once.
        """
        if not desired.frontends:
            return
        old = self.entries(desired.name)
        kind = self.space.new_table(desired, old)
        if kind.size > tables.PLACES_A_STEP:
            parts = yield from kind.making()
            self._made[desired.name] = kind, parts
        if len(desired.backends) > IN_A_STEP and not old.has_backends_of(desired):
            yield from self._writing_ahead(desired, old)

    def _writing_ahead(self, desired: DesiredService, old: ServiceEntries) -> Steps[None]:
        """Write a new block of slots in parts; before the next plan nothing refers to it."""
        known = yield from old.finding_ids(desired)
        ahead = self.space.allocate_ahead(desired, old, known)
        if ahead is None:
            return
        names = {id: each.name for id, each in zip(old.ids, old.backends, strict=True)}
        slot = ahead.block.base
        for backends, ids in zip(in_parts(ahead.backends), in_parts(ahead.ids), strict=True):
            if self.space.ahead.get(desired.name) is not ahead:
                return
            yield self._write_part(ahead.service_id, slot, backends, ids, names)
            slot += len(ids)

    def _write_part(
        self,
        service: int,
        base: int,
        backends: Sequence[DesiredBackend],
        ids: Sequence[int],
        names: Mapping[int, BackendName],
    ) -> int:
        """Add a part of a new block to what is written ahead; ``names``: of the former ids."""
        pairs, plan = list(zip(ids, backends, strict=True)), self._ahead
        known = self.former_ids.taken.union(names)
        plan.translations += [
            Translation(id, each.address, each.port) for id, each in pairs if id not in known
        ]
        plan.slots += slots(service, base, backends, ids)
        plan.backend_slots += zip(ids, range(base, base + len(ids)), strict=True)
        plan.backend_names += [(id, it.name) for id, it in pairs if names.get(id) != it.name]
        return len(pairs)

    def take_again(self) -> set[Key]:
        """Return the Services that ``admit`` may admit now, since the last call."""
        again, self._again = self._again, set()
        return again

    def take_ahead(self) -> Plan:
        """Return what is to be written before the next step of ``preparing``."""
        plan, self._ahead = self._ahead, Plan()
        self._record_last_ids(plan)
        return plan

    def is_ahead(self, name: PortName) -> bool:
        """Whether the service port's new block is written ahead."""
        return name in self.space.ahead

    def _end_ahead(self, name: PortName) -> None:
        """Forget the block that was written ahead if it is in use now; free it if it never will."""
        ahead, actual = self.space.ahead.get(name), self.entries(name)
        if ahead is None:
            return
        if actual.block != ahead.block:
            desired = self.claims.desired.get(name)
            is_planned = desired is None or desired.backends is ahead.backends
            if actual.ids is ahead.former.ids and not is_planned:
                return  # only its frontends have changed: the plan that needs the block follows
            self._free_ahead(ahead, actual)
        del self.space.ahead[name]

    def _free_ahead(self, ahead: Ahead, actual: ServiceEntries) -> None:
        self.quarantine.add(partial(self.slots.free, ahead.block))
        self.plan.backend_slots += actual.backend_slots()
        known = set(ahead.former.ids)
        self._freed += (
            Translation(id, each.address, each.port)
            for id, each in zip(ahead.ids, ahead.backends, strict=True)
            if id not in known
        )
        if not ahead.former.id:
            self._free_service_id(ahead.service_id)

    def written(self, now: float) -> None:
        """Begin the quarantine of everything that the last plan freed; it has been written."""
        self.quarantine.start(now)

    @property
    def retry_due(self) -> float:
        """When to try waiting service ports again; infinity means only after a change."""
        if self.waiting.has_tries or self._freed or self._again:
            return -math.inf
        return self.quarantine.due if self.waiting.lacks else math.inf

    def programs_replaced(self) -> None:
        """Release former ids: no program chooses by the maps of another layout any more."""
        for translation in self.former_ids.take_unclaimed():
            if translation.id < self.capacity.backend_ids:
                self.quarantine.add(partial(self.backend_ids.free, translation.id))
            self.quarantine.add(partial(self._end_translation, translation))

    def take_removals(self) -> list[Removal]:
        """Return all removals since the last call; call this after the plans were written."""
        taken = [*self.removals]
        self.removals.clear()
        return taken

    @property
    def cluster_ips(self) -> ClusterIps:
        return self.frontends.cluster_ips

    def _finish(self) -> None:
        """Add the writes that depend on all changes of a plan."""
        for _ in range(min(len(self._freed), MOST_FREED)):
            translation = self._freed.popleft()
            self._free_backend_id(translation.id)
            self.quarantine.add(partial(self._end_translation, translation))
        self.plan.removed_services += self.frontends.take_removed()
        added, removed = self.cluster_ips.take_changes()
        self.plan.cluster_ips += [(address, 1) for address in added]
        self.plan.removed_cluster_ips += removed
        ranges, self.plan.removed_source_ranges = self.source_ranges.take_changes()
        self.plan.source_ranges = [(range, 1) for range in ranges]
        if self.plan.removed_services or self.plan.removed_source_ranges:
            self.waiting.freed(EVERYONE)
        self._record_last_ids(self.plan)

    def _record_last_ids(self, plan: Plan) -> None:
        last_ids = LastIds(self.service_ids.last, self.backend_ids.last)
        if last_ids != self._last_ids:
            plan.last_ids = [last_ids]
            self._last_ids = last_ids

    def _load(self, contents: MapContents) -> None:
        self.actual = dict(contents.entries)
        for name, entries in self.actual.items():
            self._count(name, NO_ENTRIES, entries)
            self.service_ids.mark_used([entries.id])
            self.slots.mark_used(entries.block)
            self.space.choices.mark_used(entries.tables)
            self.frontends.load(name, entries.services)
            if entries.restricted:
                self.source_ranges.load(entries.id, entries.source_ranges)
            self.backend_ids.mark_used(entries.ids)
        former = (translation.id for translation in contents.former_translations)
        self.backend_ids.mark_used([id for id in former if id < self.capacity.backend_ids])
        self._load_leftovers(contents)
        self.frontends.load_leftovers(contents.leftover_services)
        self._load_wrong_backend_slots(dict(contents.wrong_backend_slots))
        self.source_ranges.load_leftovers(contents.leftover_source_ranges)
        self.service_ids.go_on_behind(contents.last_ids.last_service)
        self.backend_ids.go_on_behind(contents.last_ids.last_backend)

    def _load_wrong_backend_slots(self, wrong: Mapping[int, int]) -> None:
        """Correct backend_slots, and write the translations of these backends again.

        Netfilter has no translation for a backend whose id led nowhere.
        """
        self.plan.backend_slots += wrong.items()
        for entries in self.actual.values() if wrong else ():
            self.plan.translations += (it for it in entries.translations() if it.id in wrong)

    def _load_leftovers(self, contents: MapContents) -> None:
        self.space.free_leftovers(contents, self.quarantine)
        self.service_ids.mark_used(contents.leftover_service_ids)
        for id in contents.leftover_service_ids:
            self._free_service_id(id)
        self.backend_ids.mark_used(contents.leftover_backend_ids)
        for id in contents.leftover_backend_ids:
            self._free_backend_id(id)
        for translation in contents.leftover_translations:
            self.quarantine.add(partial(self._end_translation, translation))

    def _still_lacks(self, name: PortName, lack: Lack) -> Lack | None:
        if not self._is_not_made(name, lack):
            return self.space.lack(name, lack.part, lack.more)
        if lack.part == LIMIT:
            return lack
        used = getattr(self.claims.wanted.get(name.namespace, NOTHING), lack.part)
        return self.space.lacks_share(name.namespace, lack.part, used, lack.more)

    def _is_not_made(self, name: PortName, lack: Lack) -> bool:
        """Whether the service port lacks space because ``admit`` refused it."""
        desired = self.claims.desired.get(name)
        return desired is not None and desired.lack is lack

    def _plan_service(self, name: PortName) -> None:
        new, desired = None, self.claims.desired.get(name)
        lack = desired.lack if desired else None
        if desired and (frontends := self.claims.frontends_of(name)):
            old = self.entries(name)
            new, lacks = self.space.fit(desired, frontends, old)
            lack = lacks or lack
        self.waiting.set(name, lack)
        if new:
            self._change(name, new)
        else:
            self._remove(name)
        self._end_ahead(name)
        self._made.pop(name, None)

    def _remove(self, name: PortName) -> None:
        old = self.actual.pop(name, None)
        if old is None:
            return
        self.changed.setdefault(name, old)
        self._count(name, old, NO_ENTRIES)
        self.frontends.remove(name, old.services)
        self.source_ranges.remove(old.id)
        self._free_block(old, used_ids=frozenset())
        self.quarantine.add(partial(self.space.choices.free, old.tables))
        self._free_service_id(old.id)
        self.removals += removals(name, old, NO_ENTRIES)

    def _change(self, name: PortName, new: ServiceEntries) -> None:
        old = self.entries(name)
        self._write(name, old, new)
        if new.block != old.block or new.services != old.services:
            self.changed.setdefault(name, old)
        if new.block != old.block:
            self._free_block(old, used_ids=frozenset(new.ids))
        if new.block != old.block or new.services.keys() != old.services.keys():
            self.removals += removals(name, old, new)

    def _count(self, name: PortName, old: ServiceEntries, new: ServiceEntries) -> None:
        self.backends += len(new.backends) - len(old.backends)
        if end_rest := self.space.replace(name, old, new):
            self.quarantine.add(end_rest)

    def _write(self, name: PortName, old: ServiceEntries, new: ServiceEntries) -> None:
        self.actual[name] = new
        if new == old and all(self.holder(f) == name for f in new.services):
            return
        self._count(name, old, new)
        if new.block != old.block and not self._is_written(name, new):
            self.plan.translations += new.translations(but=self.former_ids.taken.union(old.ids))
            self.plan.slots += new.slots()
            self.plan.backend_slots += new.backend_slots()
        if new.tables != old.tables:
            self.plan.tables += finished(new.making_tables(self._made.get(name)))
            self.quarantine.add(partial(self.space.choices.free, old.tables))
        if not old.id:
            self.plan.service_names.append((new.id, name))
        if not self._is_written(name, new):
            known = {id: backend.name for id, backend in zip(old.ids, old.backends, strict=True)}
            named = ((id, each.name) for id, each in zip(new.ids, new.backends, strict=True))
            self.plan.backend_names += [pair for pair in named if known.get(pair[0]) != pair[1]]
        self.plan.services += self.frontends.change(name, old.services, new.services)
        self.source_ranges.change(new.id, new.source_ranges, restricted=new.restricted)

    def _is_written(self, name: PortName, new: ServiceEntries) -> bool:
        """Whether the slots of the entries were written ahead."""
        ahead = self.space.ahead.get(name)
        return ahead is not None and ahead.block == new.block

    def _free_block(self, old: ServiceEntries, used_ids: frozenset[int]) -> None:
        if old.block.size:
            self.quarantine.add(partial(self.slots.free, old.block))
        self._freed += old.translations(but=used_ids)

    def _end_translation(self, translation: Translation) -> None:
        self.plan.removed_translations.append(translation)

    def _free_service_id(self, id: int) -> None:
        self.plan.removed_service_names.append(id)
        self.quarantine.add(partial(self.service_ids.free, id))

    def _free_backend_id(self, id: int) -> None:
        """Free the id.

        With this write, clients' affinity and sockets' assignments to the backend end: the hooks
        look up the backend's slot by id and find none.
        """
        self.former_ids.taken.discard(id)
        self.plan.removed_backend_slots.append(id)
        self.plan.removed_backend_names.append(id)
        self.quarantine.add(partial(self.backend_ids.free, id))
