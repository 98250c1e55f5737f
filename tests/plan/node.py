# SPDX-License-Identifier: Apache-2.0
"""A simulated agent that writes the rows of plans to the maps one by one, with look-ups after each
write.
"""

from collections.abc import Iterator, Mapping, Set
from functools import partial
from itertools import chain, starmap
from typing import NamedTuple

from ebpflb.entries.services import FIRST_BACKENDS, Frontend, ServiceEntry
from ebpflb.model.addresses import Address
from ebpflb.model.endpoints import finished
from ebpflb.model.services import PortName
from ebpflb.plan.allocators import QUARANTINE_SECONDS, Capacity, Release
from ebpflb.plan.desired import DesiredService
from ebpflb.plan.planner import Plan, Planner
from ebpflb.plan.space import UNLIMITED, Shares
from tests.plan.builders import CAPACITY, CLIENTS
from tests.plan.simulation import Backends, Drawn, Found, Maps, Rights, Write, WrongLookup, writes

Lookups = dict[Frontend, Found]
Keys = set[tuple[int, int]]


class Reader(NamedTuple):
    """A program's view: the service as the program read it, and the backends that it would have
    found at once.
    """

    since: float
    backends: Backends
    drawn: tuple[Drawn, ...]
    admitted: list[Address]


def _frontends_of_changing_ips(before: Maps, after: Maps) -> set[Frontend]:
    """Return the frontends of cluster IPs that a plan adds or removes."""
    come = after.cluster_ips.keys() - before.cluster_ips.keys()
    gone = before.cluster_ips.keys() - after.cluster_ips.keys()
    return {it for it in after.services if it.address in come} | {
        it for it in before.services if it.address in gone
    }


def not_programmed(planner: Planner) -> dict[PortName, str]:
    """Return the service ports that do not fit completely, and the reason."""
    every = planner.waiting.lacks.values()
    return {name: lack.reason for ports in every for name, lack in ports.items()}


def used_by(node: "PlannedNode", namespace: str) -> dict[str, int]:
    """Return the number of a namespace's entries in each map, including those in quarantine."""
    return dict(node.planner.space._used.get(namespace, {}))  # noqa: SLF001


class PlannedNode:
    """Maps, a planner and a clock, and programs that look entries up.

    ``readers`` are programs that have read a frontend's service and go on later; ``clients`` are
    service and backend ids that clients have affinity to; ``nameless`` backend ids have a slot and
    no name, which only a crash leaves: the audit finds them.
    """

    def __init__(self, capacity: Capacity = CAPACITY, shares: Shares = UNLIMITED) -> None:
        self.capacity, self.shares = capacity, shares
        self.maps = Maps()
        self.planner = Planner(capacity, shares=shares)
        self.desired: dict[PortName, DesiredService] = {}
        self.now = 100.0
        self.readers: dict[tuple[Frontend, ServiceEntry], Reader] = {}
        self.clients: Keys = set()
        self.nameless: Set[int] = frozenset()

    @property
    def not_programmed(self) -> dict[PortName, str]:
        return not_programmed(self.planner)

    def change(
        self, changes: Mapping[PortName, DesiredService | None], stop: int | None = None
    ) -> Plan:
        """Plan the changes and write the plan, or only its first ``stop`` rows."""
        for name, port in changes.items():
            self.desired.pop(name, None)
            self.desired |= {name: port} if port else {}
        plan = self.planner.plan_changes(changes, self.now)
        self.write_rows(list(writes(plan)), stop)
        return plan

    def prepare(self, desired: DesiredService) -> None:
        """Write the slots that the service port's next plan needs; no look-up changes."""
        for _ in self.planner.preparing(desired):
            self.write_rows(list(writes(self.planner.take_ahead())))

    def restart(self, stop: int | None = None, *, damaged: bool = False) -> Plan:
        """Start a new agent on the same maps, with the same desired state. The agent makes
        netfilter's table from the maps, because no program that chose before is still running.

        ``damaged``: someone else has changed the entries that decide about the table.
        """
        self.readers.clear()
        contents = self.maps.read_back()
        self.maps.translations = self.maps.wanted_translations()
        self.nameless = self.maps.translations.keys() - self.maps.backend_names.keys()
        if not damaged:
            self._check_translations()
        self.planner = Planner(self.capacity, contents, self.shares)
        plan = self.planner.plan_everything(self.desired, self.now)
        self.write_rows(list(writes(plan)), stop)
        return plan

    def write_rows(self, rows: list[Write], stop: int | None = None) -> None:
        """Write rows one by one, and check all look-ups after each of them."""
        whole = self.maps.copy()
        for part, row in rows:
            whole.write(part, row)
        before, after = self.maps.lookups(), whole.lookups()
        stays = self.maps.live_backends().keys() & whole.live_backends().keys()
        stay_found = {key for key in stays if self.maps.find(*key)}
        rights = self.maps.rights(CLIENTS) & whole.rights(CLIENTS)
        rights = {right for right in rights if right[1] or self._stays(right[0][0], whole)}
        ips = self.maps.cluster_ips.keys() & whole.cluster_ips.keys()
        complete = _frontends_of_changing_ips(self.maps, whole)
        self.clients |= self.maps.live_backends().keys()
        self._read_services()
        for part, row in rows[:stop]:
            self.maps.write(part, row)
            self._check_capacity()
            self._check_translations()
            self._check_frontends(before, after)
            self._check_backend_slots_stay(stay_found)
            self._check_rights(rights)
            if ips - self.maps.cluster_ips.keys():
                raise WrongLookup("a cluster IP is lost meanwhile")
            self._check_cluster_ips(complete)
            self._check_readers()
        self.clients |= self.maps.live_backends().keys()
        self.planner.written(self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def wait_for_quarantine(self) -> None:
        """Wait until the quarantine is empty."""
        while self.planner.quarantine:
            self.wait(QUARANTINE_SECONDS)
            self.change({})

    def _check_capacity(self) -> None:
        """Check that the maps have room for everything: the kernel would refuse more."""
        if len(self.maps.services) > self.capacity.services:
            raise WrongLookup("map services is full")
        if len(self.maps.source_ranges) > self.capacity.source_ranges:
            raise WrongLookup("map source_ranges is full")
        if len(self.maps.cluster_ips) > self.capacity.services:
            raise WrongLookup("map cluster_ips is full")
        if max(self.maps.slots, default=0) >= self.capacity.slots:
            raise WrongLookup("there is no such slot")
        if max(self.maps.choices, default=0) >= max(1, self.capacity.choices):
            raise WrongLookup("there is no such place of a table")

    def _check_translations(self) -> None:
        """Check that netfilter sends packets to each backend that a program can choose: the
        backends of services, and those that clients find again by their id.
        """
        blocks = (self.maps.backends(s, s.block) for s in self.maps.services.values())
        found = filter(None, starmap(self.maps.find, self.clients))
        for backend in chain(*blocks, found):
            if not self.maps.is_translated(backend):
                raise WrongLookup(f"netfilter does not translate to {backend}")

    def _check_frontends(self, before: Lookups, after: Lookups) -> None:
        """Check that each frontend leads to its target from before the plan, or to that from after
        it.
        """
        now = self.maps.lookups()
        for frontend in before.keys() | after.keys():
            found = now.get(frontend)
            if found not in (before.get(frontend), after.get(frontend)):
                raise WrongLookup(f"{frontend} leads to {found} meanwhile")

    def _check_cluster_ips(self, complete: set[Frontend]) -> None:
        """Check that a cluster IP is only known while its frontends are complete.

        Otherwise it would refuse clients.
        """
        for frontend in complete - self.maps.services.keys():
            if frontend.address in self.maps.cluster_ips:
                raise WrongLookup(f"{frontend} is refused meanwhile")

    def _stays(self, frontend: Frontend, whole: Maps) -> bool:
        return self.maps.services[frontend].id == whole.services[frontend].id

    def _check_rights(self, rights: Rights) -> None:
        """Check that a client that is admitted before and after the plan is always admitted.

        Other clients are never admitted; but before a frontend passes to another service, its
        former service may admit more clients.
        """
        for (frontend, client), right in rights:
            if self.maps.admitted(frontend, client) != right:
                raise WrongLookup(f"{client} may {'not ' * right}use {frontend} meanwhile")

    def _check_backend_slots_stay(self, keys: Keys) -> None:
        """Check that a client with affinity to a backend that stays always finds it."""
        for service, number in keys:
            if not self.maps.find(service, number):
                raise WrongLookup(f"backend {number} of service {service} is lost meanwhile")

    def _read_services(self) -> None:
        """Let a program read each service just before it changes."""
        for frontend, service in self.maps.services.items():
            admitted: list[Address] = [
                client for client in CLIENTS if self.maps.admits(service, client)
            ]
            backends = self.maps.backends(service, service.block)
            self.readers[frontend, service] = Reader(
                self.now, backends, self.maps.drawn(service), admitted
            )

    def _check_readers(self) -> None:
        """Check that before the quarantine ends the slots, netfilter's translations and the table's
        places are unchanged.
        """
        for (frontend, service), reader in [*self.readers.items()]:
            if self.now - reader.since < QUARANTINE_SECONDS:
                backends = self.maps.backends(service, service.block)
                kept = self.maps.drawn(service) == reader.drawn
                translated = all(map(self.maps.is_translated, reader.backends))
                if backends != reader.backends or not kept or not translated:
                    raise WrongLookup(f"{service} was overwritten under a reader")
                self._check_admitted(frontend, service, reader)

    def _check_admitted(self, frontend: Frontend, service: ServiceEntry, reader: Reader) -> None:
        """Check that a client admitted by the service as read is still admitted, if the new service
        admits it. If other frontends keep the service restricted, ranges may be removed at once.
        """
        now = self.maps.services.get(frontend)
        others = [s for other, s in self.maps.services.items() if other != frontend]
        elsewhere = any(s.id == service.id and "restricted" in s.flags for s in others)
        for client in reader.admitted[:]:
            admitted = self.maps.admits(service, client)
            anew = now and now.id == service.id and self.maps.admits(now, client)
            if not anew or (elsewhere and not admitted):
                reader.admitted.remove(client)
            elif not admitted:
                raise WrongLookup(f"{service} was closed under a reader, {client}")


def check_tidy(node: PlannedNode) -> None:
    """Check that the maps hold only the actual state; ids and slots are used, free or waiting."""
    maps, planner = node.maps, node.planner
    maps.lookups()
    entries = planner.actual
    assert set(maps.services) == set(planner.frontends.owners)
    assert planner.backends == sum(len(p.backends) for p in entries.values())
    assert maps.service_names == {p.id: name for name, p in entries.items()}
    labels = {id: b.name for p in entries.values() for id, b in zip(p.ids, p.backends, strict=True)}
    assert maps.backend_names == labels
    needed = set().union(*(p.source_ranges for p in entries.values()))
    in_quarantine = set().union(*planner.source_ranges.quarantined.values())
    assert set(maps.source_ranges) == planner.source_ranges.present == needed | in_quarantine
    assert needed.isdisjoint(in_quarantine)
    assert set(maps.cluster_ips) == {
        f.address for f, service in maps.services.items() if "external" not in service.flags
    }
    _check_backend_slots(node)
    _check_translations(node)
    _check_ranges(node)
    _check_ids(node)
    for service in maps.services.values():
        block = maps.backends(service, service.block)
        assert service.backends == tuple(backend.id for backend in block[:FIRST_BACKENDS])


def _check_backend_slots(node: PlannedNode) -> None:
    """Check that each id leads to its slot, and that clients of removed backends find none."""
    living: Keys = set()
    for entries in node.planner.actual.values():
        for slot, backend in entries.slots():
            assert node.maps.backend_slots[backend.id] == slot
            assert node.maps.find(entries.id, backend.id) == backend
            living.add((entries.id, backend.id))
    for service, number in node.clients - living:
        assert not node.maps.find(service, number)


def _check_translations(node: PlannedNode) -> None:
    """Check that each backend has a translation, and that further translations are in quarantine or
    nameless.
    """
    actual = node.planner.actual.values()
    living = {it.id: it for entries in actual for it in entries.translations()}
    surplus = node.maps.translations.keys() - living.keys()
    assert surplus <= {*node.planner.backend_ids, *node.nameless}
    assert node.maps.translations.items() >= living.items()


def _check_ranges(node: PlannedNode) -> None:
    space, entries = node.planner.space, node.planner.actual.values()
    for allocator, taken, size in (
        (space.slots, [p.block for p in entries], node.capacity.slots),
        (space.choices, [p.tables for p in entries], node.capacity.choices),
    ):
        freed = [call.args[0] for call in _quarantined(node.planner) if call.func == allocator.free]
        runs = sorted(run for run in (*allocator.free_ranges, *taken, *freed) if run.size)
        assert [run.base for run in runs] == [0, *(sum(run) for run in runs[:-1])]
        assert sum(runs[-1]) == size
    made = (table for p in entries for table in finished(p.making_tables()))
    for at, choice in (row for table in made for row in table.rows()):
        assert node.maps.choices[at] == choice


def _check_ids(node: PlannedNode) -> None:
    planner = node.planner
    for ids, living in (
        (planner.service_ids, [p.id for p in planner.actual.values()]),
        (planner.backend_ids, [id for p in planner.actual.values() for id in p.ids]),
    ):
        quarantined = [call.args[0] for call in _quarantined(planner) if call.func == ids.free]
        assert sorted([*living, *quarantined]) == sorted(ids)
        assert all(0 < number < ids.capacity for number in ids)


def _quarantined(planner: Planner) -> Iterator[partial[None]]:
    quarantine = planner.quarantine
    batches: list[list[Release]] = [quarantine.pending, *(batch for _, batch in quarantine.waiting)]
    for batch in batches:
        for call in batch:
            assert isinstance(call, partial)
            yield call


def from_nothing(node: PlannedNode) -> Maps:
    """Return the content of a node without history for the same services."""
    fresh = PlannedNode()
    fresh.change(node.desired)
    return fresh.maps
