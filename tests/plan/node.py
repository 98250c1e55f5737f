# SPDX-License-Identifier: Apache-2.0
"""A simulated agent that carries plans out write by write, watched by everyone who may look."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName
from ebpflb.plan.allocators import QUARANTINE_SECONDS, Release
from ebpflb.plan.desired_service import DesiredService
from ebpflb.plan.entries import Frontend, Range, Service
from ebpflb.plan.plan import Plan
from ebpflb.plan.planner import Capacity, Planner
from tests.plan.builders import CLIENTS, ROOM
from tests.plan.simulation import Answer, Backends, Broken, Maps, Rights, Write, writes

Answers = dict[Frontend, Answer]
Keys = set[tuple[int, int]]


class Sleeper(NamedTuple):
    """Since when, and what would be found if it woke up at once."""

    since: float
    backends: Backends
    admitted: list[Address]


class Node:
    """Maps, a planner and a clock, and who looks things up.

    ``sleepers`` are programs that read a service and wait; ``clients`` keep a backend.
    """

    def __init__(self, capacity: Capacity = ROOM) -> None:
        self.capacity = capacity
        self.maps = Maps()
        self.planner = Planner(capacity)
        self.desired: dict[PortName, DesiredService] = {}
        self.now = 100.0
        self.sleepers: dict[Service, Sleeper] = {}
        self.clients: Keys = set()

    def change(
        self, changes: Mapping[PortName, DesiredService | None], stop: int | None = None
    ) -> Plan:
        """Plans what changed and carries it out, or only the first ``stop`` writes of it."""
        for name, port in changes.items():
            self.desired.pop(name, None)
            self.desired |= {name: port} if port else {}
        plan = self.planner.change(changes, self.now)
        self.carry_out(list(writes(plan)), stop)
        return plan

    def restart(self, stop: int | None = None) -> Plan:
        """A new agent on the same maps, which wants what the old one desired."""
        self.sleepers.clear()
        self.planner = Planner(self.capacity, self.maps.read_back())
        plan = self.planner.complete(self.desired, self.now)
        self.carry_out(list(writes(plan)), stop)
        return plan

    def carry_out(self, rows: list[Write], stop: int | None = None) -> None:
        """Looks at everything after each single write."""
        whole = self.maps.copy()
        for part, row in rows:
            whole.write(part, row)
        before, after = self.maps.answers(), whole.answers()
        stays = self.maps.living().keys() & whole.living().keys()
        kept = {key for key in stays if self.maps.find(*key)}
        rights = self.maps.rights(CLIENTS) & whole.rights(CLIENTS)
        rights = {asked for asked in rights if asked[1] or self._stays(asked[0][0], whole)}
        ips = self.maps.cluster_ips.keys() & whole.cluster_ips.keys()
        self.clients |= self.maps.living().keys()
        self._fall_asleep()
        for part, row in rows[:stop]:
            self.maps.write(part, row)
            self._fits()
            self._look_up(before, after)
            self._look_up_kept(kept)
            self._ask(rights)
            if ips - self.maps.cluster_ips.keys():
                raise Broken("a cluster IP is lost meanwhile")
            self._wake_up()
        self.clients |= self.maps.living().keys()
        self.planner.applied(self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def rest(self) -> None:
        """Until nothing rests any more."""
        while self.planner.quarantine:
            self.wait(QUARANTINE_SECONDS)
            self.change({})

    def _fits(self) -> None:
        """The kernel would refuse more."""
        if len(self.maps.services) > self.capacity.services:
            raise Broken("map services is full")
        if len(self.maps.source_ranges) > self.capacity.source_ranges:
            raise Broken("map source_ranges is full")
        if len(self.maps.cluster_ips) > self.capacity.services:
            raise Broken("map cluster_ips is full")
        if max(self.maps.slots, default=0) >= self.capacity.slots:
            raise Broken("there is no such slot")

    def _look_up(self, before: Answers, after: Answers) -> None:
        """Every frontend leads to what it led to before, or to what it will lead to."""
        now = self.maps.answers()
        for frontend in before.keys() | after.keys():
            if now.get(frontend) not in (before.get(frontend), after.get(frontend)):
                raise Broken(f"{frontend} leads to {now.get(frontend)} meanwhile")

    def _stays(self, frontend: Frontend, whole: Maps) -> bool:
        return self.maps.services[frontend].id == whole.services[frontend].id

    def _ask(self, rights: Rights) -> None:
        """Who may use a frontend before and after may do so all the time.

        Who may not, never; but before a frontend changes hands, its former service may let more in.
        """
        for (frontend, client), right in rights:
            if self.maps.lets_in(frontend, client) != right:
                raise Broken(f"{client} may {'not ' * right}use {frontend} meanwhile")

    def _look_up_kept(self, keys: Keys) -> None:
        """Whoever keeps a backend that stays finds it all the time."""
        for service, number in keys:
            if not self.maps.find(service, number):
                raise Broken(f"backend {number} of service {service} is lost meanwhile")

    def _fall_asleep(self) -> None:
        """Somebody reads each service value just before it changes."""
        for service in self.maps.services.values():
            admitted = [client for client in CLIENTS if self.maps.admits(service, client)]
            backends = self.maps.backends(service, service.block)
            self.sleepers[service] = Sleeper(self.now, backends, admitted)

    def _wake_up(self) -> None:
        """Less than the quarantine later, the slots are as they were."""
        for service, sleeper in self.sleepers.items():
            if self.now - sleeper.since < QUARANTINE_SECONDS:
                if self.maps.backends(service, service.block) != sleeper.backends:
                    raise Broken(f"{service} was overwritten under a reader")
                self._is_let_in(service, sleeper)

    def _is_let_in(self, service: Service, sleeper: Sleeper) -> None:
        """Who was let in by what it read is, while whoever reads the service anew is all the time.

        Unless the service remains restricted by other frontends, which shut out others at once.
        """
        now = self.maps.services.get(service.frontend)
        others = [s for s in self.maps.services.values() if s.frontend != service.frontend]
        elsewhere = any(s.id == service.id and "restricted" in s.flags for s in others)
        for client in sleeper.admitted[:]:
            admitted = self.maps.admits(service, client)
            anew = now and now.id == service.id and self.maps.admits(now, client)
            if not anew or (elsewhere and not admitted):
                sleeper.admitted.remove(client)
            elif not admitted:
                raise Broken(f"{service} was closed under a reader, {client}")


def check_tidy(node: Node) -> None:
    """The maps hold what is programmed and nothing else, and every number is accounted for."""
    maps, planner = node.maps, node.planner
    maps.answers()
    programmed = planner.actual
    assert set(maps.services) == set(planner.owners)
    assert planner.backends == sum(len(p.backends) for p in programmed.values())
    assert maps.service_names == {p.id: name for name, p in programmed.items()}
    labels = {
        id: b.name for p in programmed.values() for id, b in zip(p.ids, p.backends, strict=True)
    }
    assert maps.backend_names == labels
    asked = set().union(*(p.source_ranges for p in programmed.values()))
    idle = set().union(*planner.source_ranges.quarantined.values())
    assert set(maps.source_ranges) == planner.source_ranges.held == asked | idle
    assert asked.isdisjoint(idle)
    assert set(maps.cluster_ips) == {
        f.address for f, service in maps.services.items() if "external" not in service.flags
    }
    _check_members(node)
    _check_ranges(node)
    _check_ids(node)


def _check_members(node: Node) -> None:
    """Each member points to its slot, and a client of a former backend does not find that."""
    living: Keys = set()
    for programmed in node.planner.actual.values():
        for slot, backend in programmed.slots():
            assert node.maps.members[backend.id] == slot
            assert node.maps.find(programmed.id, backend.id) == backend
            living.add((programmed.id, backend.id))
    for service, number in node.clients - living:
        assert not node.maps.find(service, number)


def _check_ranges(node: Node) -> None:
    planner = node.planner
    taken = [p.block for p in planner.actual.values() if p.block.size]
    resting = [call.args[0] for call in _resting(planner) if isinstance(call.args[0], Range)]
    everything = sorted([*planner.slots.free_ranges, *taken, *(r for r in resting if r.size)])
    assert [run.base for run in everything] == [0, *(sum(run) for run in everything[:-1])]
    assert sum(everything[-1]) == node.capacity.slots


def _check_ids(node: Node) -> None:
    planner = node.planner
    for ids, living in (
        (planner.service_ids, [p.id for p in planner.actual.values()]),
        (planner.backend_ids, [id for p in planner.actual.values() for id in p.ids]),
    ):
        resting = [call.args[0] for call in _resting(planner) if call.func == ids.free]
        assert sorted([*living, *resting]) == sorted(ids.used)
        assert all(0 < number < ids.capacity for number in ids.used)


def _resting(planner: Planner) -> Iterator[partial[None]]:
    quarantine = planner.quarantine
    batches: list[list[Release]] = [
        quarantine.pending,
        *(batch for _, batch in quarantine.waiting),
    ]
    for batch in batches:
        for call in batch:
            assert isinstance(call, partial)
            yield call
