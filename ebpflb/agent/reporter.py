# SPDX-License-Identifier: Apache-2.0
"""Health, metrics and health-check node ports, from what the agent's loop does.

The reporter only observes. The loop reports each event that it applied, that a sync is wanted, and
how each sync ended; what follows from these three stands in kube-proxy.md 10, 13.1, 14 and 16.4.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping

from ebpflb.model import annotations, drift, services
from ebpflb.model.addresses import Address, Family
from ebpflb.model.applied import Applied, ObjectWarning, SliceChange
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.drift import Drift
from ebpflb.model.events import Key, Kind
from ebpflb.model.health_check import HealthCheck
from ebpflb.model.no_local_endpoints import NoLocalEndpoints
from ebpflb.model.objects import Node
from ebpflb.model.trigger_times import TriggerTimes
from ebpflb.rate_limit import object_limit
from ebpflb.serve.health import Health
from ebpflb.serve.metrics import Metrics
from ebpflb.serve.service_health import ServiceHealth
from ebpflb.serve.status import AgentStatus

log = logging.getLogger(__name__)


class Reporter:
    """Called by the agent's thread only."""

    def __init__(
        self,
        health: Health,
        metrics: Metrics,
        service_health: ServiceHealth,
        clock: Callable[[], float] = time.time,
        record_unknown_node: Callable[[str], None] = lambda note: None,
        record_drift: Callable[[str], None] = lambda note: None,
        record_annotation: Callable[[ObjectWarning], None] = lambda warning: None,
        record_limit: Callable[[ObjectWarning], None] = lambda warning: None,
        ports_not_open: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """``clock`` gives seconds since the epoch; the ``record_`` make an event.
        ``ports_not_open``: server -> why it cannot listen.
        """
        self.ports_not_open = ports_not_open
        self._record_annotation, self._record_limit = record_annotation, record_limit
        self._may_warn = object_limit().allows
        self._record_unknown_node, self._node_unknown = record_unknown_node, ""
        self._record_drift = record_drift
        self._health, self._metrics, self._service_health = health, metrics, service_health
        self._clock = clock
        metrics.queued()  # as kube-proxy does when it begins
        self._triggers = TriggerTimes(since=clock())
        self._pending_services: set[Key] = set()  # changed, and not synced yet
        self._pending_slices: set[Key] = set()

    def event_applied(self, change: Applied, node: Node | None) -> None:
        """An event has changed the cluster state, in which the Node is ``node`` now."""
        for warning in change.warnings:
            if self._may_warn((warning.kind, warning.key)):
                log.warning("%s", warning)
                if annotations.is_about_one(warning.text):
                    self._record_annotation(warning)
                elif services.is_about_limit(warning.text):
                    self._record_limit(warning)
        for each in change.slices.values():
            self._observe_trigger(each)
        self._pending_services |= change.services
        self._pending_slices |= change.slices.keys()
        self._metrics.service_changes(change.service_events)
        self._metrics.endpoint_changes(len(change.slices))
        self._metrics.pending(len(self._pending_services), len(self._pending_slices))
        self._health.set_node(node)

    def check_node(self, cluster: ClusterState, source: str) -> str | None:
        """What is wrong if no Node has this node's name; a warning and an event when it is new."""
        lacks_node = Kind.NODE in cluster.listed and cluster.node is None
        unknown = f'no Node "{cluster.node_name}" in {source}' if lacks_node else ""
        if unknown and not self._node_unknown:
            log.warning("%s: /healthz answers 503; set --hostname-override", unknown)
            self._record_unknown_node(unknown)
        elif self._node_unknown and not unknown:
            log.warning('the Node "%s" is there now', cluster.node_name)
        self._node_unknown = unknown
        return unknown or None

    def sync_queued(self) -> None:
        """Something is to be written to the maps."""
        self._health.queued()
        self._metrics.queued()

    def synced(
        self,
        seconds: float,
        *,
        full: bool,
        checks: Mapping[Key, HealthCheck],
        listening: Mapping[Family, Collection[Address]],
        no_local: NoLocalEndpoints,
        complete: bool,
    ) -> None:
        """Pending changes are in the maps, all if ``complete``, in the order of kube-proxy.md 16.7.

        ``checks`` are the answers of health-check node ports, and ``listening`` their addresses:
        in a family that is not named, all addresses.
        """
        self._metrics.synced(seconds, full=full)
        if complete:
            self._pending_services, self._pending_slices = set(), set()
            now = self._clock()
            for family, times in self._triggers.take().items():
                self._metrics.programmed(family, [now - time for time in times])
        self._health.synced()
        self._metrics.no_local_endpoints(no_local.counts)
        self._service_health.update(checks, listening)

    def published(self, status: AgentStatus, *, in_force: bool) -> None:
        """``in_force``: whether the audit knows of nothing that keeps the data plane from it."""
        self._health.set_in_force(in_force)
        self._health.set_not_ready(status.not_ready)

    def turned(self) -> None:
        """The loop has made a turn, and everything has been in force."""
        self._health.turned()

    def drift_found(self, drifts: list[Drift]) -> None:
        """The audit has found these, which it had not found before."""
        self._metrics.drift_found(drifts)
        self._record_drift(drift.summary(drifts))

    def sync_failed(self, seconds: float, *, full: bool) -> None:
        """The pending changes could not be written, and stay pending."""
        self._metrics.failed(seconds, full=full)

    def _observe_trigger(self, change: SliceChange) -> None:
        slice = change.after or change.before
        if slice is None or slice.family is None:
            return
        if change.after is None:
            self._triggers.removed(slice.service, slice.family)
        else:
            self._triggers.changed(slice.service, slice.family, slice.trigger_time)
