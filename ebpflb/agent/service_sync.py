# SPDX-License-Identifier: Apache-2.0
"""What the services are: those that were touched are selected, planned and written.

The plan is what a crash can happen in, so nothing here is remembered that the maps do not show:
after a failed write the next one begins with what they hold.
"""

import logging
import time
from collections.abc import Callable, Mapping

from ebpflb.agent.node_sync import Machine
from ebpflb.datapath.datapath import CAPACITY, Datapath
from ebpflb.model.addresses import Family
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Key
from ebpflb.model.health_check import HealthCheck
from ebpflb.model.no_local_endpoints import (
    NoLocalEndpoints,
    TrafficPolicy,
    policies_without_endpoints,
)
from ebpflb.model.services import PortName
from ebpflb.plan.desired_service import DesiredService, desired_service
from ebpflb.plan.entries import Prefix
from ebpflb.plan.plan import Plan
from ebpflb.plan.planner import Planner
from ebpflb.serve import status
from ebpflb.serve.status import AgentStatus

log = logging.getLogger(__name__)

BATCH = 250  # services a plan: a plan for all of 10,000 would hold every entry twice
_UNPLACED = "Service %s: %s; its last good state stays"

MakePlan = Callable[[Mapping[PortName, DesiredService | None], float], Plan]


class Services:
    """Writes the services of the picture. Raises KernelError where the maps cannot be read."""

    def __init__(
        self, datapath: Datapath, cluster: ClusterState, machine: Machine, words: AgentStatus
    ) -> None:
        self.datapath = datapath
        self.cluster = cluster
        self.machine = machine
        self.words = words
        self._start_over()

    def _start_over(self) -> None:
        """Only the maps know what they hold: read them, and plan all anew."""
        self.planner = Planner(CAPACITY, self.datapath.present())
        self.names: dict[Key, set[PortName]] = {}
        self.checks: dict[Key, HealthCheck] = {}  # what health-check node ports are to say
        self.no_local = NoLocalEndpoints()
        self.lost = False  # what the maps hold is not what is planned
        self.programmed = False  # all of them have been written
        self.cluster.changed_services |= self.cluster.services.keys()

    @property
    def span(self) -> dict[Family, Prefix]:
        """Holds all cluster IPs, and all ranges that they may be from."""
        self.planner.cover(self.cluster.service_cidrs)
        return self.planner.covering_prefixes

    def write(self) -> None:
        """What was touched, and what did not fit before.

        Raises KernelError having written a part; then it is to be called again, and writes all.
        """
        if self.lost:
            self._start_over()
        self.lost = True
        keys = sorted(self.cluster.take_changed_services())
        for start in range(0, len(keys), BATCH):
            self._write_batch(keys[start : start + BATCH], self.planner.change)
        if self.planner.unplaced or not self.programmed:
            self._write_batch([], self.planner.change if self.programmed else self.planner.complete)
        self.lost, self.programmed = False, True
        self._report()

    def _write_batch(self, keys: list[Key], make_plan: MakePlan) -> None:
        changes = {name: desired for key in keys for name, desired in self._desired(key)}
        began = time.monotonic()
        plan = make_plan(changes, began)
        planned = time.monotonic()
        if plan:
            self.machine.write_settings(self.span)
            self.datapath.apply(plan)
            spent = (planned - began) * 1e3, (time.monotonic() - planned) * 1e3
            log.info("%r planned in %.1f ms, written in %.1f ms", plan, *spent)
        self.planner.applied(time.monotonic())

    def _desired(self, key: Key) -> list[tuple[PortName, DesiredService | None]]:
        """What a service's ports want now; None for ports that it no longer has."""
        desired: dict[PortName, DesiredService | None] = dict.fromkeys(self.names.pop(key, ()))
        policies = dict.fromkeys(desired, frozenset[TrafficPolicy]())
        for port, selection in self.cluster.ports(key):
            desired[port.name] = desired_service(port, selection, self.cluster.primary)
            policies[port.name] = policies_without_endpoints(port, selection)
        for name, local in policies.items():
            self.no_local.update(name, local)
        if now := {name for name, each in desired.items() if each}:
            self.names[key] = now
        self._check(key)
        return list(desired.items())

    def _check(self, key: Key) -> None:
        self.checks.pop(key, None)
        if checked := self.cluster.health_check(key):
            self.checks[key] = checked

    def _report(self) -> None:
        unplaced = {str(name): reason for name, reason in self.planner.unplaced.items()}
        self.words.unplaced = status.renew(self.words.unplaced, unplaced, _UNPLACED)
