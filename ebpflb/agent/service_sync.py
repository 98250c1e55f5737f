# SPDX-License-Identifier: Apache-2.0
"""Selects, plans and writes the services that changed.

The maps are the only memory that survives a failed write or a crash. So after a failed write they
are read again, and everything is planned anew from what they hold.
"""

import logging
import time
from collections.abc import Callable, Mapping

from ebpflb.agent.node_sync import NodeSync
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
from ebpflb.serve.status import log_new

log = logging.getLogger(__name__)

SERVICES_PER_PLAN = (
    250  # services in one plan: a plan for all of 10,000 would hold every entry twice
)
_NOT_PROGRAMMED = "Service %s: %s; its last good state stays"

MakePlan = Callable[[Mapping[PortName, DesiredService | None], float], Plan]


class ServiceSync:
    """Raises KernelError, also when it is made, where the maps cannot be read."""

    def __init__(self, datapath: Datapath, cluster: ClusterState, node_sync: NodeSync) -> None:
        self.datapath = datapath
        self.cluster = cluster
        self.node_sync = node_sync
        self.not_programmed: Mapping[str, str] = {}  # service port -> why it does not fit
        self._start_over()

    def _start_over(self) -> None:
        """Reads the maps; every service is to be planned anew."""
        self.planner = Planner(CAPACITY, self.datapath.read_contents())
        self.port_names: dict[Key, set[PortName]] = {}  # Service -> its ports in the plan
        self.health_checks: dict[Key, HealthCheck] = {}  # the answers of health-check node ports
        self.no_local = NoLocalEndpoints()
        self.must_start_over = False  # a write has failed: the planner may be wrong about the maps
        self.all_written = False  # every service has been written once
        self.cluster.changed_services |= self.cluster.services.keys()

    @property
    def service_ports(self) -> int:
        """How many are programmed."""
        return len(self.planner.actual)

    @property
    def backends(self) -> int:
        """Of all service ports that are programmed."""
        return self.planner.backends

    def cover_service_cidrs(self) -> dict[Family, Prefix]:
        """The prefixes that cover all cluster IPs, and from now on all ranges of cluster IPs."""
        return self.planner.cluster_ips.cover(self.cluster.service_cidrs)

    def write(self) -> None:
        """Writes the services that changed, and those that did not fit before.

        Raises KernelError having written a part; the next call writes everything.
        """
        if self.must_start_over:
            self._start_over()
        self.must_start_over = True
        keys = sorted(self.cluster.take_changed_services())
        for start in range(0, len(keys), SERVICES_PER_PLAN):
            self._write_batch(keys[start : start + SERVICES_PER_PLAN], self.planner.plan_changes)
        if not self.all_written:
            self._write_batch([], self.planner.plan_everything)
        elif self.planner.not_programmed:
            self._write_batch([], self.planner.plan_changes)
        self.must_start_over, self.all_written = False, True
        self._set_not_programmed()

    def _write_batch(self, keys: list[Key], make_plan: MakePlan) -> None:
        changes = {name: desired for key in keys for name, desired in self._desired(key)}
        began = time.monotonic()
        plan = make_plan(changes, began)
        planned = time.monotonic()
        if plan:
            self.node_sync.write_settings(self.cover_service_cidrs())
            self.datapath.apply(plan)
            spent = (planned - began) * 1e3, (time.monotonic() - planned) * 1e3
            log.info("%r planned in %.1f ms, written in %.1f ms", plan, *spent)
        self.planner.written(time.monotonic())

    def _desired(self, key: Key) -> list[tuple[PortName, DesiredService | None]]:
        """What a service's ports want now; None for ports that it no longer has."""
        desired: dict[PortName, DesiredService | None] = dict.fromkeys(self.port_names.pop(key, ()))
        policies = dict.fromkeys(desired, frozenset[TrafficPolicy]())
        for port, selection in self.cluster.ports(key):
            desired[port.name] = desired_service(port, selection, self.cluster.primary)
            policies[port.name] = policies_without_endpoints(port, selection)
        for name, local in policies.items():
            self.no_local.update(name, local)
        if names := {name for name, each in desired.items() if each}:
            self.port_names[key] = names
        self._set_health_check(key)
        return list(desired.items())

    def _set_health_check(self, key: Key) -> None:
        self.health_checks.pop(key, None)
        if check := self.cluster.health_check(key):
            self.health_checks[key] = check

    def _set_not_programmed(self) -> None:
        reasons = {str(name): reason for name, reason in self.planner.not_programmed.items()}
        log_new(self.not_programmed, reasons, _NOT_PROGRAMMED)
        self.not_programmed = reasons
