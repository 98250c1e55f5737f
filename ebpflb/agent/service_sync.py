# SPDX-License-Identifier: Apache-2.0
"""Select, plan and write the services that changed.

The maps are the only memory that survives a failed write or a crash. So after a failed write they
are read again, and everything is planned again from their content.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

from ebpflb.agent.loop import Part
from ebpflb.agent.node_sync import NodeSync
from ebpflb.cluster.event_recorder import object_limit
from ebpflb.entries.services import Frontend, Prefix, protocol_name
from ebpflb.errors import KernelError
from ebpflb.kernel.datapath import Datapath
from ebpflb.model import endpoints
from ebpflb.model.addresses import Family
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.endpoint_slices import StoredSlice
from ebpflb.model.endpoints import (
    HealthCheck,
    LocalEndpoints,
    NoLocalEndpoints,
    Selection,
    Steps,
    places,
    policies_without_endpoints,
)
from ebpflb.model.events import MAX_LISTED, MAX_NAMED_IN_LINE, Key
from ebpflb.model.facts import Fact
from ebpflb.model.hand_over import handed_to, keeps_here
from ebpflb.model.nodes import listener
from ebpflb.model.services import KUBERNETES, PortName, Protocol, ServicePort
from ebpflb.plan.canary import is_canary
from ebpflb.plan.desired import ANY, DesiredService, desiring, not_made
from ebpflb.plan.planner import Plan, Planner
from ebpflb.plan.service_entries import ServiceEntries, SlowStarts, existing
from ebpflb.plan.space import Shares
from ebpflb.plan.stale import DELETED, Change, Removal, Watched, united
from ebpflb.stopping import parts

log = logging.getLogger(__name__)

# The Services that remain to be planned, in the order in which namespaces have their turns.
#
# No namespace delays another one for longer than a slice. A namespace that had no work comes first,
# as a sparse flow does in fq_codel: its change is in the next slice, however many namespaces have
# much to do. Those take turns, a step each.
#
# Endless repetition is limited too. A namespace that has used its ``BURST`` of processor
# time begins no other Service until ``RATE`` of the time since then makes up for it; the changes of
# a Service that come meanwhile are planned together, once.

SLICE_COST = 1024  # cost of steps that are planned and written at once: at most some 10 ms
BURST = 3.0  # seconds of processor time: all Services of a large cluster, planned again
RATE = 0.25  # of a processor, for one namespace

Changes = Mapping[PortName, DesiredService | None]
NO_CHANGES: Changes = {}


class Step(NamedTuple):
    """A part of the work for one Service.

    ``changes`` are the new states of service ports, for one plan; None: it is deleted. A step
    without changes has only prepared a later one. ``cost`` is in units of about 10 µs.
    """

    cost: int
    changes: Changes = NO_CHANGES


class Budget:
    """The processor time that each namespace has used. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._even: dict[str, float] = {}  # namespace -> when all that it used is made up for

    def spend(self, namespace: str, seconds: float) -> None:
        now, even = self._clock(), self._even
        even[namespace] = max(now, even.pop(namespace, now)) + seconds / RATE
        while even and even[oldest := next(iter(even))] <= now:
            del even[oldest]

    def held_until(self, namespace: str) -> float:
        """When the namespace may begin another Service."""
        return self._even.get(namespace, -math.inf) - BURST / RATE


class _Queue:
    """One namespace's waiting Services, and the one whose steps are being taken."""

    def __init__(self) -> None:
        self.waiting: dict[Key, None] = {}
        self.current: tuple[Key, Iterator[Step]] | None = None
        self.next: Step | None = None  # of the current Service, left to the next slice

    def __bool__(self) -> bool:
        return bool(self.waiting) or self.current is not None

    def step(self, begin: Callable[[Key], Iterator[Step]]) -> Step | None:
        """Take the next step; None at the end of a Service."""
        if step := self.next:
            self.next = None
            return step
        if self.current is None:
            key = next(iter(self.waiting))
            del self.waiting[key]
            self.current = key, begin(key)
        step = next(self.current[1], None)
        if step is None:
            self.current = None
        return step


class Backlog:
    """The waiting Services.

    ``begin`` returns the steps of a Service. A Service that changes meanwhile is planned once more
    after its steps have been taken. ``most`` is the cost of a slice.
    """

    def __init__(
        self, begin: Callable[[Key], Iterator[Step]], budget: Budget, most: float = SLICE_COST
    ) -> None:
        self._begin, self._budget, self._most = begin, budget, most
        self._queues: dict[str, _Queue] = {}
        self._sparse: dict[str, None] = {}  # namespaces that had nothing to do, in their order
        self._busy: dict[str, None] = {}  # the others; one may have become empty
        self._held: list[tuple[float, str]] = []  # until when, a heap
        self._costs: Counter[str] = Counter()  # of the last slice, by namespace

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __contains__(self, key: Key) -> bool:
        queue = self._queues.get(key.namespace)
        if queue is None:
            return False
        return key in queue.waiting or (queue.current is not None and queue.current[0] == key)

    @property
    def namespaces(self) -> Collection[str]:
        """The namespaces that have waiting Services; some may have none any more."""
        return self._queues.keys()

    @property
    def due(self) -> float:
        """When ``take_slice`` returns something next, by the budget's clock."""
        if self._sparse or self._busy:
            return -math.inf
        return self._held[0][0] if self._held else math.inf

    def add(self, keys: Collection[Key]) -> None:
        for key in sorted(keys):
            queue = self._queues.get(key.namespace)
            if queue is None:
                queue = self._queues[key.namespace] = _Queue()
                self._sparse[key.namespace] = None
            queue.waiting[key] = None

    def take_slice(self, now: float) -> dict[PortName, DesiredService | None]:
        """Return the next steps' changes; they must be planned before the next call.

        A step that is larger than a slice begins the next one, so that no other change waits for it
        to be written. The end of a Service is no step, and does not cost a turn.
        """
        while self._held and self._held[0][0] <= now:
            self._busy[heappop(self._held)[1]] = None
        changes: dict[PortName, DesiredService | None] = {}
        self._costs.clear()
        while self._costs.total() < self._most and (namespace := self._next(now)) is not None:
            queue = self._queues[namespace]
            step = queue.step(self._begin)
            if step and step.cost > self._most and changes:
                queue.next = step
                break
            if step or not queue:
                self._sparse.pop(namespace, None)
                self._busy.pop(namespace, None)
                self._busy[namespace] = None  # empty or not: it is not sparse before its next turn
            self._costs[namespace] += step.cost if step else 1
            changes |= step.changes if step else {}
        self._forget_empty()
        return changes

    def spent(self, seconds: float) -> None:
        """Note the processor time that the last slice has taken, with its plan and its writes."""
        total = self._costs.total()
        for namespace, cost in self._costs.items():
            self._budget.spend(namespace, seconds * cost / total)

    def _next(self, now: float) -> str | None:
        """Return the namespace whose turn it is; None if each is done or held."""
        for turns in (self._sparse, self._busy):
            while turns:
                namespace = next(iter(turns))
                queue, until = self._queues[namespace], self._budget.held_until(namespace)
                if queue.current or (queue and until <= now):
                    return namespace
                del turns[namespace]
                if queue:
                    heappush(self._held, (until, namespace))
                else:
                    del self._queues[namespace]
        return None

    def _forget_empty(self) -> None:
        """Forget the namespaces that would have the next turns, and have nothing to do."""
        while self._busy and not self._queues[namespace := next(iter(self._busy))]:
            del self._busy[namespace], self._queues[namespace]


_PORT_COST, _FRONTEND_COST = 16, 2  # of a step, without its endpoints and source ranges
MOST_JOINED = 4 * SLICE_COST  # of the ports that are planned together
_WORTH_A_STEP = 512  # cost: steps of less are joined
_Made = TypeVar("_Made")
SERVICES_PER_PLAN = 250  # one plan for all of 10,000 would hold every entry twice


def _in_steps(steps: Steps[_Made]) -> Generator[Step, None, _Made]:
    """Yield preparing steps, joined to a worthwhile size; return the result."""
    cost = 0
    try:
        while True:
            cost += next(steps)
            if cost >= _WORTH_A_STEP:
                yield Step(cost)
                cost = 0
    except StopIteration as end:
        made: _Made = end.value
        return made


def _claim_in_words(names: Sequence[PortName]) -> str:
    """Say which Service has a frontend, and which others claim it, or some of many."""
    owner, *others = names[: 1 + MAX_NAMED_IN_LINE]
    more = len(names) - 1 - len(others)
    words = [f"{owner.owner} has it", *(f"not {it.owner}" for it in others)]
    return ", ".join([*words, f"and not {more} more"] if more else words)


_NOT_PROGRAMMED = "Service %s: %s; its existing entries stay in place"
FAILED_RETRY = 30.0  # seconds
MOST_IN_STATUS = 1000  # Services: a tenant may have any number of those that do not fit


def _planning(service: Key) -> str:
    """Name the part of the agent that plans one Service."""
    return f"Service {service}"


class ServiceSync(Part):
    """Writes the services. Raises KernelError, also at its creation, if maps cannot be read.

    ``clock`` is a monotonic clock, in seconds, and ``cpu_clock`` counts this thread's processor
    time. ``record_lack`` makes an event for a Service that does not fit. ``not_programmed``:
    Service -> why a port of it does not fit.

    If the planning of a Service raises an exception (a bug), its entries stay as
    they are, it is planned again by itself every FAILED_RETRY, and the other Services go on.
    """

    name = "services"

    def __init__(
        self,
        datapath: Datapath,
        cluster: ClusterState,
        node_sync: NodeSync,
        clock: Callable[[], float] = time.monotonic,
        record_lack: Callable[[Key, str], None] = lambda service, reason: None,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self.datapath = datapath
        self.cluster = cluster
        cluster.claimed = lambda: self.planner.claims.claimants.items()
        self.node_sync = node_sync
        self.not_programmed: Mapping[str, str] = {}
        self.contested: Mapping[str, str] = {}  # frontend -> the Service with it, and those without
        self._record_lack = record_lack
        self._may_warn = object_limit(clock).allows
        self._lacking: set[Key] = set()
        self._shares = Shares(node_sync.options.namespace_share)
        self._canary: frozenset[PortName] = frozenset()
        self.slow_starts = SlowStarts()
        self._changed: dict[PortName, ServiceEntries] = {}  # the next result of ``take_changed``
        self._removals: list[Removal] = []  # the planner's; kept when a write fails
        self._watched: dict[PortName, Change] = {}  # the next result of ``take_watched``
        self._hands_over = node_sync.options.admission.hands_over
        self._written: set[PortName] = set()  # the next result of ``take_written``
        self.port_names: dict[Key, tuple[PortName, ...]] = {}  # Service -> its ports in the plan
        self._failed: dict[Key, float] = {}  # Service -> when it is planned again
        self._budget = Budget(clock)
        self._start_over()

    def _start_over(self) -> None:
        """Read the maps; every service must be planned again."""
        contents = self.datapath.read_contents()
        self.planner = Planner(self.datapath.capacity, contents, self._shares)
        self._removals[:] = united(self._removals)
        self.planner.changed, self.planner.removals = self._changed, self._removals
        self.planner.waiting.changed |= self._lacking
        # In force until the cluster's own ranges are received: meanwhile unused addresses in them
        # are dropped, as before.
        self.planner.cluster_ips.cover(frozenset(self.datapath.service_ranges()))
        servers = [its for name, its in self.planner.actual.items() if name.owner == KUBERNETES]
        self.cluster.set_former_servers(
            frozenset(each.endpoint for its in servers for each in its.backends)
        )
        self.health_checks: dict[Key, HealthCheck] = {}  # the answers of health-check node ports
        self.no_local = NoLocalEndpoints()
        self._covering: Mapping[Family, Prefix] | None = None  # as last written
        self.must_start_over = False  # a write has failed: the planner may be wrong about the maps
        self.all_written = False  # every service has been written once
        self.plan_all()
        # What one write of a manifest changes is one plan: there are no tenants.
        most = math.inf if self.node_sync.options.manifests else SLICE_COST
        self.backlog = Backlog(self._steps, self._budget, most)

    def plan_all(self) -> None:
        """Plan every Service again, with the next writes.

        Deleted Services are included, so that watchers of ports see the deletion.
        """
        self.cluster.changed_services |= self.cluster.services.keys() | self.port_names.keys()

    @property
    def service_ports(self) -> int:
        """The number of programmed service ports, without the canary's."""
        return len(self.planner.actual) - len(self._canary_entries())

    @property
    def backends(self) -> int:
        """The number of backends of all programmed service ports, without the canary's."""
        return self.planner.backends - sum(len(it.backends) for it in self._canary_entries())

    def cover_service_cidrs(self) -> Mapping[Family, Prefix]:
        """Return the prefixes that cover all cluster IPs, and all ranges of cluster IPs."""
        return self.planner.cluster_ips.cover(self.cluster.service_cidrs)

    @property
    def complete(self) -> bool:
        """Whether every service is written as planned, as far as is known."""
        return self.all_written and not self.must_start_over

    @property
    def due(self) -> float:
        """When ``turn`` has something to do, by the clock."""
        return self.slow_starts.due

    def turn(self) -> None:
        """Let weights grow, with the next sync."""
        for name in self.slow_starts.take_due(self.planner.actual, self._clock()):
            if (key := Key(name.namespace, name.service)) in self.cluster.services:
                self.cluster.changed_services.add(key)
            else:
                self.slow_starts.forget(name)

    def status(self) -> Mapping[str, Any]:
        return {
            "service_ports": self.service_ports,
            "backends": self.backends,
            "claimed_twice": self.contested,
            "not_programmed": dict(islice(self.not_programmed.items(), MOST_IN_STATUS)),
        }

    @property
    def retry_due(self) -> float:
        """When ``write`` should go on with what had to wait, by the clock."""
        return min(self.planner.retry_due, self.backlog.due, *self._failed.values(), math.inf)

    def take_changed(self) -> dict[PortName, ServiceEntries]:
        """Return the service ports that were written since the last call, as they were before.

        To be called after a successful ``write``: those of a failed one are among the next result.
        """
        changed = dict(self._changed)
        self._changed.clear()
        return changed

    def take_written(self) -> set[PortName]:
        """Return the service ports that were planned, or lost a frontend, since the last call."""
        written, self._written = self._written, set()
        return written

    def take_watched(self) -> dict[PortName, Change]:
        """Return the changes of service ports whose connections are reset, since the last call.

        To be called after the changes were written. Empty if nothing is translated.
        """
        changes, self._watched = self._watched, {}
        if self.node_sync.options.shadow:
            return {}
        for name, change in changes.items():
            if isinstance(change, Watched):
                frontends = frozenset(self.planner.claims.frontends_of(name))
                changes[name] = change._replace(frontends=frontends)
        return changes

    def free_api_servers(self) -> None:
        """Remove frontends in the maps that hide an API server from this agent.

        Raises KernelError.
        """
        wanted = (Frontend(*place, Protocol.TCP) for place in self.cluster.api_places.taken)
        if hiding := [each for each in wanted if self._hides_api_server(each)]:
            log.warning("removed, because an API server is there: %s", ", ".join(map(str, hiding)))
            self.datapath.apply(Plan(removed_services=hiding))
            self._start_over()

    def _hides_api_server(self, frontend: Frontend) -> bool:
        name = self.planner.holder(frontend)
        if name is None or frontend not in (entries := self.planner.entries(name)).services:
            return False
        endpoints = [each.endpoint for each in entries.backends]
        is_external = "external" in entries.services[frontend].flags
        return is_external and not self.cluster.api_places.are_free_for(name.owner, endpoints)

    def write(self) -> None:
        """Write the services that changed, and some that did not fit before.

        After everything was written once, each call writes one slice of the backlog. Raises
        KernelError after a part was written; the next call then writes everything.
        """
        if self.must_start_over:
            self._start_over()
        self.must_start_over = True
        changed = self.cluster.take_changed_services() | self.planner.take_again()
        changed -= self._failed.keys()
        if self.all_written:
            began = self._cpu_clock()
            self.backlog.add(changed)
            self._write_changes(self.backlog.take_slice(self._clock()))
            self.backlog.spent(self._cpu_clock() - began)
        else:
            self._write_everything(sorted(changed))
        self._try_failed()
        self.must_start_over, self.all_written = False, True
        self._set_not_programmed()
        self._set_contested()

    def _write_everything(self, keys: list[Key]) -> None:
        for start in range(0, len(keys), SERVICES_PER_PLAN):
            self._write_changes(self._changes_of(keys[start : start + SERVICES_PER_PLAN]))
        self._write_changes({}, but=self._failed.keys())
        self.node_sync.flowtable.start_over(self.planner.frontends.owners)

    def _changes_of(self, keys: Iterable[Key]) -> Changes:
        steps = (step for key in keys for step in self._steps(key))
        return dict(chain.from_iterable(step.changes.items() for step in steps))

    def _try_failed(self) -> None:
        """Plan the Services that failed, each by itself."""
        now = self._clock()
        for key in [key for key, due in self._failed.items() if due <= now]:
            del self._failed[key]
            self._write_changes(self._changes_of([key]))
            if key not in self._failed:
                parts.succeeded(_planning(key))

    def _fail(self, services: Collection[Key], error: Exception) -> None:
        """Note that planning these Services has failed; of several, at least one did."""
        pause = FAILED_RETRY if len(services) == 1 else 0.0
        self._failed |= dict.fromkeys(services, self._clock() + pause)
        for key in services if pause else ():
            parts.failed(_planning(key), error)

    def write_canary(self, wanted: Mapping[PortName, DesiredService]) -> str | None:
        """Replace the canary at once; return why it does not fit and was removed, or None.

        Raises KernelError; then the next ``write`` starts over, without a canary.
        """
        self.must_start_over = True
        former: dict[PortName, DesiredService | None] = dict.fromkeys(self._canary)
        self._write_changes(former | dict(wanted))
        self._canary = frozenset(wanted)
        full = next(filter(None, map(self.planner.lacks, wanted)), None)
        if full:
            self._write_changes(dict.fromkeys(wanted))
            self._canary = frozenset()
        self.must_start_over = False
        return full

    @property
    def has_canary(self) -> bool:
        """Whether the canary is still there: a start-over does not write it again."""
        return bool(self._canary) and self._canary <= self.planner.claims.desired.keys()

    def _canary_entries(self) -> list[ServiceEntries]:
        return [self.planner.actual[it] for it in self._canary if it in self.planner.actual]

    def _write_changes(self, changes: Changes, but: Collection[Key] | None = None) -> None:
        """Write the changes; ``but``: remove what is not desired, except of these Services."""
        try:
            began = self._clock()
            if but is None:
                plan = self.planner.plan_changes(changes, began)
            else:
                plan = self.planner.plan_everything(changes, began, but)
            planned = self._clock()
            if plan:
                self._write_plan(plan)
                seconds = planned - began, self._clock() - planned
                log.debug("planned in %.4f s, written in %.4f s: %s", *seconds, plan)
            self.planner.written(self._clock())
            if self._hands_over:
                self._written.update(changes, self._changed)
        except KernelError:
            raise
        except Exception as error:  # the planner may be wrong about the maps: it starts over
            self._fail({name.owner for name in changes if not is_canary(name)}, error)
            raise

    def _write_plan(self, plan: Plan) -> None:
        self._write_covering()
        self.datapath.apply(plan)
        if self.node_sync.flowtable.enabled:
            self.node_sync.flowtable.written(plan)

    def _write_covering(self) -> None:
        """Write the covering prefixes, before the plan with their cluster IPs."""
        covering = self.cover_service_cidrs()
        if covering is not self._covering:
            self.node_sync.write_settings(covering)
            self._covering = covering

    def _steps(self, key: Key) -> Iterator[Step]:
        """Yield the desired state of a service's ports; if that fails, the rest stays as it is."""
        try:
            yield from self._steps_of_ports(key)
        except KernelError:
            raise
        except Exception as error:
            self._fail([key], error)
            if any(map(self.planner.is_ahead, self.port_names.get(key, ()))):
                raise  # it has a block that no plan will use: the planner starts over

    def _steps_of_ports(self, key: Key) -> Iterator[Step]:
        """Yield the desired state of a service's ports; removed ports come first.

        Ports between which a port number moves, as if one is renamed, are in one plan.
        """
        ports = self.cluster.services.get(key, ())
        former, names = self.port_names.pop(key, ()), tuple([port.name for port in ports])
        self.port_names[key] = tuple(dict.fromkeys((*former, *names)))  # until all are planned
        gone, moving = set(former).difference(names), self._moving(ports)
        for name in gone - moving:
            yield self._step(_PORT_COST, {name: None})
        joined: dict[PortName, DesiredService | None] = dict.fromkeys(gone & moving)
        cost = _PORT_COST * len(joined)
        slices, local = self.cluster.slices_of_ports(key), LocalEndpoints()
        for port in ports:
            for step in self._steps_of_port(port, endpoints.of_port(slices, port.name), local):
                if not (step.changes and port.name in moving):
                    yield step
                    continue
                joined.update(step.changes)
                cost += step.cost
                if cost > MOST_JOINED:
                    yield self._step(cost, joined)
                    joined, cost = {}, 0
        if joined:
            yield self._step(cost, joined)
        self._set_health_check(key, local.health_check)
        self.port_names.pop(key, None)
        if names:
            self.port_names[key] = names

    def _moving(self, ports: Iterable[ServicePort]) -> set[PortName]:
        """Return a Service's ports that take a number from each other, or lose one."""
        moving = set[PortName]()
        for port in ports:
            protocol, family = int(port.name.protocol), port.name.family
            nodeport = [(ANY[family], port.node_port)] if port.node_port else []
            for place in [(port.cluster_ip, port.port), *nodeport]:
                holder = self.planner.holder(Frontend(*place, protocol))
                if holder and holder != port.name and holder.owner == port.name.owner:
                    moving |= {holder, port.name}
        return moving

    def _step(self, cost: int, changes: Changes) -> Step:
        """Return the step; forget what is kept about the service ports that it deletes."""
        for name in (name for name, desired in changes.items() if desired is None):
            # A Service without ports still exists, but now another proxy must serve it.
            is_left = self.cluster.services.get(name.owner) == ()
            self._watched[name] = None if is_left else DELETED
            self.no_local.update(name, frozenset())
            self.slow_starts.forget(name)
        return Step(cost, changes)

    def _steps_of_port(
        self, port: ServicePort, slices: list[StoredSlice], local: LocalEndpoints
    ) -> Iterator[Step]:
        lack = self.planner.admit(port, endpoints.count(slices, port.name))
        entries = self.planner.entries(port.name)
        if lack and not entries.id:
            self.no_local.update(port.name, frozenset())
            yield Step(_PORT_COST, {port.name: not_made(port, lack)})
            return
        selection = yield from _in_steps(self.cluster.selecting(port.name, slices))
        local.add(port, selection)
        desired = yield from _in_steps(self._desiring(port, selection))
        if lack:
            desired = existing(desired, entries, lack)
        yield from self._prepared(desired)

    def _prepared(self, desired: DesiredService) -> Iterator[Step]:
        """Yield the steps that prepare a service port's plan, then the step with its plan.

        The plan that uses what was prepared ends a slice, so the Service cannot begin again before.
        """
        cost = _PORT_COST + len(desired.source_ranges) + _FRONTEND_COST * len(desired.frontends)
        for each in self.planner.preparing(desired):
            if ahead := self.planner.take_ahead():
                self.datapath.apply(ahead)
            yield Step(each)
        is_ahead = self.planner.is_ahead(desired.name)
        cost = max(cost, SLICE_COST) if is_ahead else cost + len(desired.backends)
        yield Step(cost, {desired.name: desired})

    def _desiring(self, port: ServicePort, selection: Selection) -> Steps[DesiredService]:
        grace, watched = port.reset_after, None
        if grace is not None:
            watched = Watched(grace, frozenset(), places(selection.listed))
        self._watched[port.name] = watched
        self.no_local.update(port.name, policies_without_endpoints(port, selection))
        programmed = self.planner.entries(port.name)
        node_local = port.node_local
        if node_local and listener(port) not in self.cluster.observed[Fact.ANSWERING_LISTENERS]:
            node_local = None
        about = self.cluster.primary, node_local, self.cluster.untracked, self.cluster.api_places
        own = self.cluster.node_name
        handed, keeps = None, False
        if port.hands_over:
            handed = handed_to(port, selection, own, self.cluster.observed[Fact.HANDED_NODES])
            keeps = keeps_here(port, handed, own)
        wanted = yield from desiring(port, selection, *about, handed, keeps_here=keeps)
        grown = wanted, port.slow_start, programmed, self._clock()
        return (yield from self.slow_starts.applying(*grown))

    def _set_health_check(self, key: Key, check: HealthCheck | None) -> None:
        self.health_checks.pop(key, None)
        if check:
            self.health_checks[key] = check

    def _set_contested(self) -> None:
        """Note contested frontends; only some are named, so that thousands take no time."""
        found = self._withheld() | {
            f"{frontend}/{protocol_name(frontend.protocol)}": _claim_in_words(names)
            for frontend, names in islice(self.planner.claims.contested.items(), MAX_LISTED)
        }
        for frontend, text in found.items():
            if self.contested.get(frontend) != text and self._may_warn(text):
                log.warning("frontend %s is claimed more than once: %s", frontend, text)
        self.contested = found

    def _withheld(self) -> dict[str, str]:
        """Return the frontends that API servers have, and a Service that wants each of them."""
        return {
            f"{frontend}/TCP": f"an API server has it, not {name.namespace}/{name.service}"
            for name, frontends in islice(self.planner.claims.withheld.items(), MAX_LISTED)
            for frontend in frontends
        }

    def _set_not_programmed(self) -> None:
        """Log and report each Service that has begun to lack space."""
        waiting, before = self.planner.waiting, self.not_programmed
        changed, waiting.changed = waiting.changed, set()
        if not changed:
            return
        names = set(map(str, changed))
        now = {name: reason for name, reason in before.items() if name not in names}
        for key in sorted(changed & waiting.lacks.keys()):
            reason = next(iter(waiting.lacks[key].values())).reason
            now[str(key)] = reason
            if before.get(str(key)) != reason and self._may_warn(key):
                log.warning(_NOT_PROGRAMMED, key, reason)
                self._record_lack(key, reason)
        self.not_programmed, self._lacking = now, set(waiting.lacks)
