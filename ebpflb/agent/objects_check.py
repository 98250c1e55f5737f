# SPDX-License-Identifier: Apache-2.0
"""The audit of what is planned: against a fresh list of the cluster's objects.

The maps are compared with the plan (audit_checks.py). Here the plan is compared with the state of
the cluster, and that with what the API server says. A watch that has lost an event, or an error of
ours, would leave a service as it was for good. All is listed and watched anew then.

An API server has many agents to answer: the first list is made a whole period after the start, a
period is at least OBJECT_PERIODS sync periods and SECONDS_PER_OBJECT for each object, and up to
half as long again, at random.
"""

import logging
import random
import time
from collections.abc import Callable, Iterator

from ebpflb.agent.node_sync import NodeSync
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.cluster.source import FreshList, Source
from ebpflb.errors import ClusterError
from ebpflb.model import agreement
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.drift import Drift, Part
from ebpflb.model.endpoints import Selection
from ebpflb.model.events import Key, Kind
from ebpflb.model.services import ServicePort
from ebpflb.plan.canary import is_canary
from ebpflb.plan.desired import DesiredService, desired_service
from ebpflb.plan.service_entries import desired_in_force

log = logging.getLogger(__name__)

OBJECT_PERIODS = 10  # sync periods from one list to the next, at least
SECONDS_PER_OBJECT = 0.1
_OBJECTS_A_STEP = 16  # objects in one step
_OTHERWISE = "is planned otherwise"

Steps = Iterator[list[Drift] | None]


class ObjectsCheck:
    """What is planned is what a fresh list of the API says."""

    name = "objects"

    def __init__(
        self,
        source: Source,
        cluster: ClusterState,
        node_sync: NodeSync,
        service_sync: ServiceSync,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._cluster, self._service_sync = source, cluster, service_sync
        self._shortest = OBJECT_PERIODS * node_sync.options.sync_period
        self._clock, self._begun = clock, clock()
        self._distrusted: list[FreshList] = []
        self._plan_anew: set[Key] = set()

    @property
    def period(self) -> float:
        cluster = self._cluster
        objects = len(cluster.services) + len(cluster.slices)
        return max(self._shortest, SECONDS_PER_OBJECT * objects) * (1 + random.random() / 2)

    @property
    def possible(self) -> bool:
        has_rested = self._clock() - self._begun >= self._shortest
        return self._cluster.complete and self._service_sync.complete and has_rested

    def steps(self) -> Steps:
        self._distrusted, self._plan_anew = [], set()
        for fresh in self._source.fresh_lists():
            try:
                yield from self._list(fresh)
            except ClusterError as error:  # the source says itself that it cannot be read
                log.warning("audit: no fresh list of %s: %s", fresh.kind, error)
            finally:
                fresh.end()
        yield from self._plans()

    def repair(self) -> None:
        for fresh in self._distrusted:
            fresh.distrust()
        if self._plan_anew:
            self._service_sync.must_start_over = True
            self._cluster.changed_services |= self._plan_anew
        self._distrusted, self._plan_anew = [], set()

    def _list(self, fresh: FreshList) -> Steps:
        """What was emitted before ``begin`` is in the inbox, so it is applied one turn later."""
        while fresh.restarting:
            yield None
        if not fresh.begin():
            return
        yield None
        kind, found, listed = fresh.kind, dict[Key, str](), set[Key]()
        while (objects := fresh.page()) != {}:
            if objects is None:
                yield None
                continue
            listed |= objects.keys()
            for number, (key, read) in enumerate(objects.items()):
                if text := agreement.difference(self._cluster, kind, key, read):
                    found[key] = text
                if not number % _OBJECTS_A_STEP:
                    yield []
        found |= dict.fromkeys(agreement.known(self._cluster, kind) - listed, agreement.GONE)
        yield self._compared(fresh, found)

    def _compared(self, fresh: FreshList, found: dict[Key, str]) -> list[Drift]:
        """Without what has changed since the list was begun."""
        changed = fresh.changed()
        if changed is None:
            return []
        wrong = sorted(found.keys() - changed)
        if wrong:
            self._distrusted.append(fresh)
        return [Drift(Part.OBJECT, f"{fresh.kind} {key}", found[key]) for key in wrong]

    def _plans(self) -> Steps:
        """What is desired of each service, against the state of the cluster, and the reverse."""
        for key in list(self._cluster.services):
            yield self._unplanned(key, self._desires_all(key))
        for name in list(self._service_sync.planner.claims.desired):
            if is_canary(name):
                continue
            ports = self._cluster.services.get(key := Key(name.namespace, name.service), ())
            yield self._unplanned(key, any(port.name == name for port in ports))

    def _unplanned(self, key: Key, is_planned: bool) -> list[Drift]:
        is_pending = key in self._cluster.changed_services or key in self._service_sync.backlog
        if is_planned or is_pending:
            return []
        self._plan_anew.add(key)
        return [Drift(Part.OBJECT, f"{Kind.SERVICE} {key}", _OTHERWISE)]

    def _desires_all(self, key: Key) -> bool:
        desired = self._service_sync.planner.claims.desired
        return all(
            desired.get(port.name) == self._wanted(port, selection)
            for port, selection in self._cluster.ports(key)
        )

    def _wanted(self, port: ServicePort, selection: Selection) -> DesiredService:
        """With a slow start the weights are those of their time."""
        wanted = desired_service(port, selection, self._cluster.primary)
        desired = self._service_sync.planner.claims.desired
        return desired_in_force(wanted, desired.get(port.name)) if port.slow_start else wanted
