# SPDX-License-Identifier: Apache-2.0
"""The parts that only observe: health, metrics and Events, the history, sources, a kube-proxy.

They are called once in each turn of the loop, after everything was written. kube-proxy.md 10, 13.1,
14, 16.4 and 16.7 define what follows from an event, and from a sync.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ebpflb import files
from ebpflb.agent.audit import TABLE_NAME, Audit
from ebpflb.agent.loop import Part, Turn
from ebpflb.agent.node_sync import NodeSync
from ebpflb.agent.stale import StaleWorker
from ebpflb.agent.sync import Sync
from ebpflb.cluster.event_recorder import object_limit
from ebpflb.history.records import History
from ebpflb.model import annotations, events
from ebpflb.model.api_servers import KeptApiServers
from ebpflb.model.cluster_state import Applied, ClusterState, SliceChange, TriggerTimes
from ebpflb.model.events import Disturbed, Drift, Key, Kind, SourceStatus
from ebpflb.model.kube_proxy import Detection
from ebpflb.options import Options
from ebpflb.serve import status
from ebpflb.serve.conditions import not_ready
from ebpflb.serve.health import Health
from ebpflb.serve.metrics import Metrics
from ebpflb.serve.servers import HttpServers
from ebpflb.serve.status import rfc3339

log = logging.getLogger(__name__)

MOST_PENDING = 10_000  # Services, and slices, of one namespace that are counted


class Reporter(Part):
    """Health, metrics, Events, and health-check node ports."""

    name = "reports"

    def __init__(
        self,
        servers: HttpServers,
        metrics: Metrics,
        sync: Sync,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``clock`` returns seconds since the epoch."""
        self._servers, self._metrics, self._sync, self._clock = servers, metrics, sync, clock
        self._health = servers.health
        self._may_warn = object_limit().allows
        self._node_unknown = ""
        metrics.queued()  # like kube-proxy at its start
        self._triggers = TriggerTimes(since=clock())
        self._pending: dict[str, tuple[set[Key], set[Key]]] = {}  # of Services, of slices

    def observe(self, turn: Turn) -> None:
        for _, applied in turn.applied:
            self._note_event(applied)
        if turn.applied:
            self._health.set_node(self._sync.cluster.node)
        if turn.seconds is not None or self._sync.has_changes:
            self._health.queued()
            self._metrics.queued()
        if turn.seconds is not None and turn.has_failed:
            self._metrics.failed(turn.seconds, full=turn.full)
        elif turn.seconds is not None:
            self._note_sync(turn.seconds, full=turn.full)
        if turn.applied or turn.seconds is not None:
            self._count_pending()

    def _note_event(self, change: Applied) -> None:
        for warning in change.warnings:
            if self._may_warn((warning.kind, warning.key)):
                log.warning("%s", warning)
                if annotations.is_about_one(warning.text):
                    self._servers.record_annotation(warning)
        for each in change.slices.values():
            self._observe_trigger(each)
        for at, keys in enumerate((change.services, change.slices)):
            for key in keys:
                self._note_pending(key, at)
        if change.service_events:
            self._metrics.service_changes(change.service_events)
        if change.slices:
            self._metrics.endpoint_changes(len(change.slices))

    def _note_sync(self, seconds: float, *, full: bool) -> None:
        """Note that changes are in the maps: all, except some of the waiting namespaces."""
        service_sync = self._sync.service_sync
        waiting = service_sync.backlog.namespaces
        self._metrics.synced(seconds, full=full)
        self._pending = {each: its for each, its in self._pending.items() if each in waiting}
        now = self._clock()
        for family, times in self._triggers.take(waiting).items():
            self._metrics.programmed(family, [now - time for time in times])
        self._health.synced()
        if service_sync.no_local.changed:
            self._metrics.no_local_endpoints(service_sync.no_local.counts)
            service_sync.no_local.changed = False
        listening = self._sync.node_sync.health_check_addresses
        self._servers.service_health.update(service_sync.health_checks, listening)

    def drift_found(self, drifts: list[Drift]) -> None:
        """Report differences that the audit had not found before."""
        self._metrics.drift_found(drifts)
        self._servers.record_drift(events.summary(drifts))

    def status(self) -> Mapping[str, Any]:
        unknown = self._check_node(self._sync.cluster, self._sync.options.source)
        return {"node_unknown": unknown, "ports_not_open": self._servers.ports_not_open()}

    def _check_node(self, cluster: ClusterState, source: str) -> str | None:
        """Return the problem if no Node has this node's name.

        A new one is logged and makes an event.
        """
        lacks_node = Kind.NODE in cluster.listed and cluster.node is None
        unknown = f'no Node "{cluster.node_name}" in {source}' if lacks_node else ""
        if unknown and not self._node_unknown:
            log.warning("%s: /healthz answers 503; set --hostname-override", unknown)
            self._servers.record_unknown_node(unknown)
        elif self._node_unknown and not unknown:
            log.warning('the Node "%s" exists now', cluster.node_name)
        self._node_unknown = unknown
        return unknown or None

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


class Recorder(Part):
    """Has the history record each turn that changed a service port."""

    name = "history"

    def __init__(self, history: History, sync: Sync) -> None:
        self._history, self._sync = history, sync

    def observe(self, turn: Turn) -> None:
        for event, applied in turn.applied:
            self._history.event(event, applied)
        for cause in turn.causes:
            self._history.because(cause)
        if self._sync.is_written:
            changed = self._sync.service_sync.take_changed()
            now = self._sync.service_sync.planner.actual
            self._history.commit(changed, now, keep=self._sync.has_more)


class Stale(Part):
    """Ends connections to removed endpoints."""

    name = "stale endpoints"
    takes = (Disturbed, Detection)

    def __init__(self, worker: StaleWorker, sync: Sync) -> None:
        self._worker, self._sync = worker, sync
        self._must_check_all = False  # this was not told of everything
        self._others = frozenset[str]()  # rules of a kube-proxy

    def take(self, message: Disturbed | Detection) -> None:
        if isinstance(message, Disturbed):
            if message.check == TABLE_NAME:
                self._worker.check_untranslated()
            return
        if self._others - {*message.rules}:
            self._worker.check_everything()  # sockets that they served
        self._others = frozenset(message.rules)

    def observe(self, turn: Turn) -> None:
        if turn.has_new_devices:
            self._worker.check_untranslated()
        if not self._sync.is_written:
            return
        is_full = self._must_check_all or (turn.full and turn.seconds is not None)
        self._must_check_all = True  # unless the end is reached
        services = self._sync.service_sync
        removals, watched = services.planner.take_removals(), services.take_watched()
        if removals or watched:
            self._worker.check(removals, watched)
        if is_full:
            self._worker.check_everything()
        self._must_check_all = False

    def status(self) -> Mapping[str, Any]:
        return {"udp_not_ended": self._worker.error}


class SourceErrors(Part):
    """Which sources of objects, and of facts about this node, cannot be read."""

    name = "sources"
    takes = (SourceStatus,)

    def __init__(self, received: Callable[[], Mapping[str, float]]) -> None:
        """``received``: kind -> when its source last sent anything."""
        self._received = received
        self.errors: dict[str, str] = {}  # by source

    def take(self, message: SourceStatus) -> None:
        """Log an error once, and the recovery.

        An API server is a source for each kind: its error is logged once, and its recovery when it
        has recovered for all kinds.
        """
        source, error = message.source, message.error
        self.errors.pop(source, None)
        server = _server_of(source)
        others = [it for name, it in self.errors.items() if _server_of(name) == server]
        if error:
            self.errors[source] = error
            if error not in others:
                log.warning("%s: %s", source, error)
        elif not others:
            log.info("%s: recovered", server)

    def status(self) -> Mapping[str, Any]:
        last = {kind: rfc3339(at) for kind, at in self._received().items()}
        return {"source_errors": dict(self.errors), "last_received": last}


def _server_of(source: str) -> str:
    """Return the API server that the source's objects come from; else the source."""
    scheme, is_url, rest = source.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}" if is_url else source


class BesideKubeProxy(Part):
    """Whether a kube-proxy runs on this node, or has left anything."""

    name = "kube-proxy"
    takes = (Detection,)

    def __init__(self, left_to_kube_proxy: str) -> None:
        self._left = left_to_kube_proxy
        self._found: Detection | None = None

    def take(self, message: Detection) -> None:
        self._found = message._replace(left_to_it=self._left)
        if self._found.log_message:
            log.warning("%s", self._found.log_message)

    def status(self) -> Mapping[str, Any]:
        if self._found is None:
            return {}
        return {"kube_proxy": self._found.message, "kube_proxy_runs": self._found.running}


class Publisher:
    """Publishes the agent's status; most turns of the loop change nothing in it.

    Other threads may read ``status``, the last published one.
    """

    def __init__(self, options: Options, health: Health, audit: Audit, node_sync: NodeSync) -> None:
        begun = status.initial(node=options.node_name, source=options.source)
        self.status = begun.changed(
            left_to_kube_proxy=options.left_to_kube_proxy,
            standalone=bool(options.manifests),
        )
        self._health, self._audit, self._node_sync = health, audit, node_sync
        self._file = status.StatusFile(options.paths)
        self._published: object = None  # the values that the status was made from

    def publish(self, fields: Mapping[str, Any]) -> None:
        """Publish the status with these fields, if anything has changed."""
        now = self.status.changed(**fields)
        in_force = events.in_force(self._audit.drift) and self._node_sync.is_reached
        if (now, in_force) != self._published:
            self.status = now
            self._health.set_in_force(in_force)
            self._health.set_not_ready(not_ready(now))
            # If the file could not be written, it is written in the next turn.
            self._published = (now, in_force) if self._file.write(now) else None


# The file of the API servers, which outlives a reboot, unlike the pinned maps.

log = logging.getLogger(__name__)

_LARGEST_FILE = 1 << 16  # bytes


class ApiServersFile(Part):
    """``name`` takes the URLs of the API servers: those that were read, and each time they change.

    The agent asks them when its own API servers are gone.
    """

    name = "API servers"

    def __init__(
        self, options: Options, cluster: ClusterState, name: Callable[[list[str]], object]
    ) -> None:
        self._options, self._cluster, self._name_urls = options, cluster, name
        self._path = options.paths.api_servers_file
        self._last: KeptApiServers | None = None

    def started(self) -> None:
        """Read what an earlier agent has kept, if that is usable."""
        if self._options.keeps_api_servers:
            self._last = files.decode_regular(self._path, KeptApiServers, _LARGEST_FILE)
        if self._last:
            self._name_urls(self._last.urls)

    def observe(self, turn: Turn) -> None:
        """Write the file if the API servers have changed."""
        if not turn.seconds or turn.has_failed or not self._cluster.complete:
            return
        found = self._cluster.api_servers()
        if found is None or found == self._last:
            return
        self._last = found
        self._name_urls(found.urls)
        try:
            files.replace(self._path, msgspec.json.encode(found))
        except OSError as error:
            log.warning("the API servers are not kept for the next start: %s", error)
