# SPDX-License-Identifier: Apache-2.0
"""Health, metrics and health-check node ports, from the actions of the agent's loop.

The reporter only observes. The loop reports each event that it applied, each requested sync, and
the result of each sync; kube-proxy.md 10, 13.1, 14 and 16.4 define what follows.
"""

import logging
import time
from collections.abc import Callable, Collection, Container, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from ebpflb.cluster.event_recorder import object_limit
from ebpflb.model import annotations, events
from ebpflb.model.addresses import Address, Family
from ebpflb.model.cluster_state import (
    Applied,
    ClusterState,
    SliceChange,
    TriggerTimes,
)
from ebpflb.model.endpoints import HealthCheck, NoLocalEndpoints
from ebpflb.model.events import MAX_LISTED, Drift, Key, Kind, named
from ebpflb.model.objects import Node
from ebpflb.options import Options
from ebpflb.serve import status
from ebpflb.serve.conditions import not_ready
from ebpflb.serve.metrics import Metrics
from ebpflb.serve.servers import HttpServers
from ebpflb.serve.status import AgentStatus, rfc3339

if TYPE_CHECKING:
    from ebpflb.agent.loop import Agent


log = logging.getLogger(__name__)


MOST_PENDING = 10_000  # Services, and slices, of one namespace that are counted


class Reporter:
    """Called by the agent's thread only."""

    def __init__(
        self,
        servers: HttpServers,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``clock`` returns seconds since the epoch."""
        self.servers, self._metrics, self._clock = servers, metrics, clock
        self._health = servers.health
        self._may_warn = object_limit().allows
        self._node_unknown = ""
        metrics.queued()  # like kube-proxy at its start
        self._triggers = TriggerTimes(since=clock())
        self._pending: dict[str, tuple[set[Key], set[Key]]] = {}  # of Services, of slices

    def event_applied(self, change: Applied, node: Node | None) -> None:
        """Note that an event has changed the cluster state; ``node`` is the current Node."""
        for warning in change.warnings:
            if self._may_warn((warning.kind, warning.key)):
                log.warning("%s", warning)
                if annotations.is_about_one(warning.text):
                    self.servers.record_annotation(warning)
        for each in change.slices.values():
            self._observe_trigger(each)
        for at, keys in enumerate((change.services, change.slices)):
            for key in keys:
                self._note_pending(key, at)
        self._metrics.service_changes(change.service_events)
        self._metrics.endpoint_changes(len(change.slices))
        self._count_pending()
        self._health.set_node(node)

    def check_node(self, cluster: ClusterState, source: str) -> str | None:
        """Return the problem if no Node has this node's name.

        A new one is logged and makes an event.
        """
        lacks_node = Kind.NODE in cluster.listed and cluster.node is None
        unknown = f'no Node "{cluster.node_name}" in {source}' if lacks_node else ""
        if unknown and not self._node_unknown:
            log.warning("%s: /healthz answers 503; set --hostname-override", unknown)
            self.servers.record_unknown_node(unknown)
        elif self._node_unknown and not unknown:
            log.warning('the Node "%s" exists now', cluster.node_name)
        self._node_unknown = unknown
        return unknown or None

    def sync_queued(self) -> None:
        """Note that something has to be written to the maps."""
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
        waiting: Container[str],
    ) -> None:
        """Note that changes are in the maps (order: kube-proxy.md 16.7).

        All are, except some of the namespaces in ``waiting``.

        ``checks`` are the answers of health-check node ports, and ``listening`` their addresses:
        all addresses in a family that is missing.
        """
        self._metrics.synced(seconds, full=full)
        self._pending = {each: its for each, its in self._pending.items() if each in waiting}
        self._count_pending()
        now = self._clock()
        for family, times in self._triggers.take(waiting).items():
            self._metrics.programmed(family, [now - time for time in times])
        self._health.synced()
        self._metrics.no_local_endpoints(no_local.counts)
        self.servers.service_health.update(checks, listening)

    def published(self, status: AgentStatus, *, in_force: bool) -> None:
        """Take a published status; ``in_force``: the audit knows of no fault of the data plane."""
        self._health.set_in_force(in_force)
        self._health.set_not_ready(not_ready(status))

    def turned(self) -> None:
        """Note that the loop has made a turn, and everything has been in force."""
        self._health.turned()

    def drift_found(self, drifts: list[Drift]) -> None:
        """Report differences that the audit had not found before."""
        self._metrics.drift_found(drifts)
        self.servers.record_drift(events.summary(drifts))

    def sync_failed(self, seconds: float, *, full: bool) -> None:
        """Note that the pending changes could not be written, and stay pending."""
        self._metrics.failed(seconds, full=full)

    def _note_pending(self, key: Key, at: int) -> None:
        keys = self._pending.setdefault(key.namespace, (set(), set()))[at]
        if len(keys) < MOST_PENDING:
            keys.add(key)

    def _count_pending(self) -> None:
        services, slices = (sum(len(its[at]) for its in self._pending.values()) for at in (0, 1))
        self._metrics.pending(services, slices)

    def _observe_trigger(self, change: SliceChange) -> None:
        slice = change.after or change.before
        if slice is None or slice.family is None:
            return
        if change.after is None:
            self._triggers.removed(slice.service, slice.family)
        else:
            self._triggers.changed(slice.service, slice.family, slice.trigger_time)


# Make the agent's status from the loop's state, and publish it.
#
# Most turns of the loop change nothing in it: then nothing is made, reported or written. A tenant
# may have any number of invalid objects and of Services that do not fit.

MOST_IN_STATUS = 1000


class Publisher:
    """Other threads may read ``status``, the last published one."""

    def __init__(self, options: Options, reporter: Reporter) -> None:
        begun = status.initial(node=options.node_name, source=options.source)
        self.status = begun.changed(
            removed_settings=options.removed_settings,
            socket_translation=options.socket_translation,
            left_to_kube_proxy=options.left_to_kube_proxy,
        )
        self._reporter = reporter
        self._file = status.StatusFile(options.paths)
        self._published: object = None  # the values that the status was made from

    def publish(self, status: AgentStatus, *, in_force: bool) -> None:
        """Publish a status; ``in_force`` as in Reporter.published."""
        if (status, in_force) != self._published:
            self.status = status
            self._reporter.published(status, in_force=in_force)
            # If the file could not be written, it is written in the next turn.
            self._published = (status, in_force) if self._file.write(status) else None


def make_status(agent: "Agent") -> AgentStatus:
    """Return the agent's status by the loop's current state; what the start has set stays."""
    node_sync, service_sync = agent.node_sync, agent.service_sync
    return agent.status.changed(
        programs=agent.loader.status,
        lists_complete=agent.cluster.complete,
        last_received={kind: rfc3339(at) for kind, at in agent.source.received().items()},
        service_ports=service_sync.service_ports,
        backends=service_sync.backends,
        failing_parts=dict(agent.failing_parts),
        node_unknown=agent.reporter.check_node(agent.cluster, agent.options.source),
        source_errors=dict(agent.source_errors),
        invalid_objects=_invalid_objects(agent.cluster),
        object_warnings=dict(islice(agent.cluster.warnings(), MAX_LISTED)),
        standalone=bool(agent.options.manifests),
        claimed_twice=service_sync.contested,
        not_programmed=dict(islice(service_sync.not_programmed.items(), MOST_IN_STATUS)),
        set_aside=agent.endpoint_health.listed,
        reset_on_removal=agent.on_removal.watched_ports,
        devices_not_served=node_sync.not_served,
        choices_lost=agent.uplink_canary.lost if node_sync.engine.is_netfilter else {},
        devices_to_come=len(node_sync.datapath.devices_to_come),
        flows_wait=node_sync.flows_wait,
        ports_not_open=agent.reporter.servers.ports_not_open(),
        ports_not_reserved=agent.ports_not_reserved,
        sync_error=agent.sync_error,
        udp_not_ended=agent.stale_udp.error,
        node_not_written=agent.node_readiness.error,
        packet_path=node_sync.packet_path,
        flowtable=node_sync.flowtable_state,
        kube_proxy=agent.kube_proxy,
        kube_proxy_runs=agent.kube_proxy_runs,
        attached=node_sync.attached,
        monitor=node_sync.monitor,
        in_sync=agent.in_sync,
        drift=named(agent.audit.drift),
        audit_errors=agent.audit.errors,
        objects_differ=agent.doctor_audit.differ,
    )


def _invalid_objects(cluster: ClusterState) -> dict[str, str]:
    found = islice(cluster.invalid.items(), MOST_IN_STATUS)
    return {f"{kind} {key}": reason for (kind, key), reason in found}
