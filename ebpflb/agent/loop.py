# SPDX-License-Identifier: Apache-2.0
"""The agent's loop: take an event, apply it to the cluster state, plan, apply the plan, publish.

Sources put messages into the inbox, each from a thread of its own. One thread runs the loop. In
each turn it waits for messages and takes all that are there; then it syncs if a sync is due, which
writes to the maps what differs from them; then it publishes the agent's status.

Nothing is written before Services, EndpointSlices and the Node have been received. The programs are
put in force after the first sync that wrote everything, so nothing is ever served from maps that
are half filled: not at a start, an upgrade or a restart. What cannot be written is named in the
status and tried again every second, and meanwhile what is in the maps goes on serving.
"""

import logging
import math
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ebpflb.agent import memory
from ebpflb.agent.node_sync import NodeSync, do_all
from ebpflb.agent.reporter import Reporter
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.cluster.source import Source
from ebpflb.errors import KernelError
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Changed, Event, Removed, Replaced, SourceStatus
from ebpflb.model.kube_proxy import Detection
from ebpflb.node import reserved_ports
from ebpflb.node.device_watch import DevicesChanged, DeviceWatch
from ebpflb.options import Options
from ebpflb.serve import status
from ebpflb.stale_udp.worker import StaleUdpWorker

log = logging.getLogger(__name__)

WRITE_RETRY_SECONDS = 1.0  # until what could not be written is tried again


class Stop:
    """Ends the loop."""


Message = Event | DevicesChanged | Detection | Stop
Inbox = SimpleQueue[Message]


@dataclass(eq=False)
class Agent:
    """One node's agent; ``run`` returns after ``stop`` and leaves everything in force.

    ``status`` is the one that was published last; other threads may read it.
    """

    options: Options
    inbox: Inbox
    source: Source  # of the cluster's objects
    device_watch: DeviceWatch
    cluster: ClusterState
    node_sync: NodeSync
    service_sync: ServiceSync
    stale_udp: StaleUdpWorker
    reporter: Reporter

    def __post_init__(self) -> None:
        self.stopped = False
        self.in_sync = False  # the last sync wrote everything, and nothing has failed since
        self.sync_error: str | None = None
        self.last_sync = -math.inf  # when it ended; all times are of the monotonic clock
        self.next_check = time.monotonic() + self.options.sync_period
        self.source_errors: dict[str, str] = {}
        self.kube_proxy: str | None = None  # what one does on this node, or has left there
        self.status = status.initial(node=self.options.node_name, source=self.options.source)
        self.status_file = status.StatusFile(self.options.paths)

    def run(self) -> None:
        """Raises CompileError, VerifierError or KernelError where there are no programs at all to
        serve, and ConfigurationError for addresses that do not fit the Node.
        """
        programs = self.node_sync.load_programs()
        unreserved = reserved_ports.try_to_reserve(
            self.options.paths.ports_file, *self.options.masquerade_ports
        )
        self.status = self.status.changed(programs=programs, ports_not_reserved=unreserved)
        self.device_watch.start()
        self.source.start()
        while not self.stopped:
            self._turn()
        self.source.stop()
        log.info("stopped; what is programmed serves on")

    def stop(self) -> None:
        """Safe to call from a signal handler."""
        self.inbox.put(Stop())

    def _turn(self) -> None:
        for message in self._wait():
            self._take(message)
        if self.stopped:
            return
        self._sync_if_due()
        self._check_devices()
        self._publish()
        if self.node_sync.attached:
            memory.end_startup()

    def _wait(self) -> list[Message]:
        """All messages in the inbox. Waits for the first one until something else is due."""
        due = min(self._next_sync(), self.next_check)
        try:
            messages = [self.inbox.get(timeout=max(due - time.monotonic(), 0.0))]
        except Empty:
            return []
        while not self.inbox.empty():
            messages.append(self.inbox.get())
        return messages

    def _take(self, message: Message) -> None:
        match message:
            case Replaced() | Changed() | Removed():
                applied = self.cluster.apply(message)
                for warning in applied.warnings:
                    log.warning("%s", warning)
                self.reporter.event_applied(applied, self.cluster.node)
            case DevicesChanged():
                self.node_sync.device_list = message
            case SourceStatus(source, error):
                self.source_errors.pop(source, None)
                if error:
                    self.source_errors[source] = error
                log.warning("%s: %s", source, error or "recovered")
            case Detection():
                self.kube_proxy = message.message
                if message.log_message:
                    log.warning("%s", message.log_message)
            case Stop():
                self.stopped = True

    def _has_changes(self) -> bool:
        """Whether there is anything new to write; nothing before the needed lists are received."""
        changed = self.cluster.changed_services or self.node_sync.changed or not self.in_sync
        return self.cluster.complete and bool(changed)

    def _next_sync(self) -> float:
        """When the next sync is due; infinity where only a message can make one necessary.

        Changes wait for the minimal sync period after a sync (kube-proxy.md 16.2); after a failed
        one, and for what could not be done, it is WRITE_RETRY_SECONDS.
        """
        if self._has_changes() and not self.sync_error:
            return self.last_sync + self.options.min_sync_period
        if self.sync_error or self.node_sync.not_served or self.service_sync.not_programmed:
            return self.last_sync + WRITE_RETRY_SECONDS
        return math.inf

    def _sync_if_due(self) -> None:
        has_changes = self._has_changes()
        if has_changes:
            self.reporter.sync_queued()
        if time.monotonic() >= self._next_sync():
            self._sync(has_changes=has_changes)
            self.last_sync = time.monotonic()

    def _sync(self, *, has_changes: bool) -> None:
        """Writes what changed, and tries again what could not be done.

        If a step fails the others still run; programs are attached only when all have succeeded.
        A sync of which nothing changed is not reported. kube-proxy.md 16.7: the order at the end.
        """
        full, begun = not self.in_sync, time.monotonic()
        if full and not self.sync_error:
            self.node_sync.check_families()
        try:
            do_all([self._write_node, self.service_sync.write])
            if not self.node_sync.attached:
                self.node_sync.attach()
                log.info("serving %d service ports", self.service_sync.service_ports)
        except KernelError as error:
            self._set_error(error)
            self.reporter.sync_failed(time.monotonic() - begun, full=full)
            return
        self.in_sync, self.sync_error = True, None
        if has_changes:
            self._report_sync(time.monotonic() - begun, full=full)
        planner = self.service_sync.planner
        moved = planner.frontends.take_udp_moved()
        self.stale_udp.check(planner.take_backend_changes(), frontends_moved=moved)
        if full:
            self.stale_udp.check_everything()

    def _write_node(self) -> None:
        if self.node_sync.changed or self.node_sync.not_served or not self.in_sync:
            self.node_sync.write(self.service_sync.cover_service_cidrs())

    def _report_sync(self, seconds: float, *, full: bool) -> None:
        self.reporter.synced(
            seconds,
            full=full,
            checks=self.service_sync.health_checks,
            listening=self.node_sync.health_check_addresses,
            no_local=self.service_sync.no_local,
        )

    def _check_devices(self) -> None:
        """Once per sync period: the kernel does not tell us when others detach our programs."""
        if time.monotonic() < self.next_check:
            return
        self.next_check = time.monotonic() + self.options.sync_period
        try:
            self.node_sync.restore()
        except KernelError as error:
            self._set_error(error)

    def _set_error(self, error: KernelError) -> None:
        """The next sync is a full one."""
        if str(error) != self.sync_error:
            log.error("%s; trying again every %g s", error, WRITE_RETRY_SECONDS)
        self.in_sync, self.sync_error = False, str(error)

    def _publish(self) -> None:
        invalid = self.cluster.invalid.items()
        self.status = self.status.changed(
            lists_complete=self.cluster.complete,
            service_ports=self.service_sync.service_ports,
            backends=self.service_sync.backends,
            source_errors=dict(self.source_errors),
            invalid_objects={f"{kind} {key}": reason for (kind, key), reason in invalid},
            not_programmed=self.service_sync.not_programmed,
            devices_not_served=self.node_sync.not_served,
            sync_error=self.sync_error,
            packet_path=self.node_sync.packet_path,
            socket_translation=self.options.socket_translation,
            kube_proxy=self.kube_proxy,
        )
        self.status_file.write(self.status)
