# SPDX-License-Identifier: Apache-2.0
"""The agent's loop: take an event, apply it to the cluster state, plan, apply the plan, publish.

Sources put messages into the inbox, each from its own thread. One thread runs the loop. In each
turn it waits for messages and takes those that wait; then it syncs if a sync is due, which writes
the differences to the maps; then it publishes the agent's status.

Nothing is written before Services, EndpointSlices and the Node have been received. The programs are
attached after the first sync that wrote everything, so half-filled maps never serve: neither at a
start nor at an upgrade or a restart. A failed write is named in the status and tried again every
second; meanwhile the content of the maps keeps serving.
"""

import ctypes
import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from ebpflb import stopping
from ebpflb.agent.api_servers import ApiServersFile
from ebpflb.agent.audit import TABLE_NAME, Audit
from ebpflb.agent.canary_sync import CanaryPorts, CanarySync
from ebpflb.agent.doctor_audit import DoctorAudit
from ebpflb.agent.endpoint_health import EndpointHealthSync
from ebpflb.agent.inspection import Call
from ebpflb.agent.node_local import NodeLocalSync
from ebpflb.agent.node_readiness import NodeReadiness
from ebpflb.agent.node_sync import HostChanges, NodeSync, do_all
from ebpflb.agent.on_removal.reset_worker import ConnectionsReset, ResetWorker
from ebpflb.agent.program_loader import ProgramLoader
from ebpflb.agent.reporter import Publisher, Reporter, make_status
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.agent.stale_udp.worker import StaleUdpWorker
from ebpflb.agent.uplink_canary import UplinkCanary
from ebpflb.cluster.source import Source
from ebpflb.errors import ConfigurationError, KernelError, NodeError
from ebpflb.history.recorder import (
    API_SERVERS,
    CANARY,
    DEVICES,
    NODE_LOCAL,
    UNTRACKED,
    History,
)
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node.device_watch import DevicesChanged, DeviceWatch
from ebpflb.model.addresses import host_port
from ebpflb.model.api_servers import Reached
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.endpoint_health import Outcomes
from ebpflb.model.events import (
    Changed,
    Disturbed,
    Event,
    Kind,
    ObjectEvent,
    PartStatus,
    Removed,
    Replaced,
    SourceStatus,
    Together,
    in_force,
)
from ebpflb.model.kube_proxy import Detection
from ebpflb.model.nodes import Answering, EachPacketRules, Untracked
from ebpflb.options import Options
from ebpflb.serve.status import AgentStatus
from ebpflb.stopping import parts

# The messages of other threads to the agent's loop.


class Stop:
    """Ends the loop. A signal handler may put it: ``Inbox.put`` is reentrant."""


class DevicesAttached:
    """Devices have got programs."""


Message = (
    Event
    | Together
    | DevicesAttached
    | DevicesChanged
    | Detection
    | Disturbed
    | EachPacketRules
    | PartStatus
    | ConnectionsReset
    | Reached
    | Outcomes
    | Answering
    | Untracked
    | Call[Any]
    | Stop
)


class Inbox:
    """The messages in order; any thread may put them and read the age, one thread takes them.

    ``clock`` is a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._put_at: deque[float] = deque()  # of messages not handled yet

    def put(self, message: Message) -> None:
        self._put_at.append(self._clock())
        self._messages.put(message)

    def take(self, seconds: float) -> Message | None:
        """Return the next message; wait for one up to ``seconds``."""
        try:
            return self._messages.get(timeout=seconds)
        except Empty:
            return None

    def handled(self, count: int) -> None:
        """Note that the oldest ``count`` taken messages have had their effect."""
        for _ in range(count):
            self._put_at.popleft()

    @property
    def age(self) -> float:
        """Seconds since the oldest unhandled message was put; 0 if there is none."""
        try:
            return self._clock() - self._put_at[0]
        except IndexError:
            return 0.0


GATHERING = 0.005  # seconds for which changes of a burst wait for others to share their sync
MOST_TAKING = 0.01  # seconds, for the messages of one turn
_CLOSE = 0.005  # maximum seconds between two turns of a burst, without the gathering
_MANY = 5  # such turns in succession are a burst


class Bursts:
    """Take messages from the inbox; in a burst, above some 200 per second, several at a time.

    A message that comes alone, among a few others, or among 100 per second, never waits. ``clock``
    is a monotonic clock, in seconds.
    """

    def __init__(
        self,
        inbox: Inbox,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = lambda seconds: time.sleep(seconds),
    ) -> None:
        self._inbox, self._clock, self._sleep = inbox, clock, sleep
        self._last = -math.inf  # when a turn with messages began
        self._close = 0  # such turns in succession
        self._taken = 0  # messages taken by the last call

    def waiting(self, seconds: float, most: float = MOST_TAKING) -> Iterator[Message]:
        """Yield the waiting messages; wait for the first one up to ``seconds``.

        Messages that take longer than ``most`` seconds are left to the next call, so that what is
        known by then can be written. The messages of the previous call count as handled.
        """
        self._inbox.handled(self._taken)
        self._taken = 0
        message = self._inbox.take(seconds)
        if message is None:
            return
        self._gather()
        begun = self._clock()
        while message is not None:
            self._taken += 1
            yield message
            is_late = self._clock() - begun > most
            message = None if is_late else self._inbox.take(0.0)

    def _gather(self) -> None:
        if gathering := GATHERING if self._close >= _MANY else 0.0:
            self._sleep(gathering)
        apart, self._last = self._clock() - self._last - gathering, self._clock()
        self._close = self._close + 1 if apart < _CLOSE else 0


# When Python's cyclic garbage collector runs, and what malloc(3) keeps: the whole policy.
#
# A large cluster's objects are created at the start and stay as long as the agent runs. While they
# are created, each full collection would go through all of them and find nothing. So the collector
# is off until everything is programmed; then the existing objects are frozen, and from then on it
# only checks objects that are created later.

_ARENA_MAX, _MMAP_THRESHOLD = -8, -3  # mallopt(3), glibc only
_LARGE = 256 << 10  # bytes: smaller than a page of a list


@contextmanager
def startup() -> Iterator[None]:
    """Disable collections until ``end_startup``, or until the end of the block."""
    _set_allocator()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def end_startup() -> None:
    """Freeze all existing objects: they are never checked again. Later calls do nothing."""
    if not gc.isenabled():
        gc.collect()
        _return_freed_memory()
        gc.freeze()
        gc.enable()


def _set_allocator() -> None:
    """Use one arena for all threads, and return large blocks to the kernel when they are freed.

    Otherwise each thread that reads the maps or a list leaves an arena of some megabytes, which is
    used again only by a thread that happens to get it: 4.7 MB for each checkpoint of the history.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, _LARGE)


def _return_freed_memory() -> None:
    """Return memory that glibc keeps after lists and programs (malloc_trim(3)), if it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


log = logging.getLogger(__name__)

WRITE_RETRY_SECONDS = 1.0  # between two attempts to write


def _server_of(source: str) -> str:
    """Return the address of an API server of whose objects the source is; else the source."""
    scheme, is_url, rest = source.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}" if is_url else source


class _Part:
    """A part of each turn. If it fails, nothing else does, and it rests before the next attempt.

    ``due``: when a turn is needed, by the clock, if no message comes before.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], object],
        due: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self.name, self.turn, self._due, self._clock = name, turn, due, clock
        self._rests_until = -math.inf

    @property
    def due(self) -> float:
        return max(self._due(), self._rests_until)

    def take_turn(self) -> None:
        now = self._clock()
        if now >= self._rests_until and not parts.attempt(self.name, self.turn):
            self._rests_until = now + stopping.RETRY_SECONDS


@dataclass(eq=False)
class Agent:
    """One node's agent. Other threads may read ``status``, the last published one."""

    options: Options
    inbox: Inbox
    source: Source  # of the cluster's objects, started
    device_watch: DeviceWatch
    cluster: ClusterState
    node_sync: NodeSync
    service_sync: ServiceSync
    endpoint_health: EndpointHealthSync
    node_local: NodeLocalSync
    node_readiness: NodeReadiness
    stale_udp: StaleUdpWorker
    uplink_canary: UplinkCanary
    on_removal: ResetWorker
    reporter: Reporter
    loader: ProgramLoader
    audit: Audit
    doctor_audit: DoctorAudit
    host: HostChanges
    history: History
    api_servers_file: ApiServersFile
    clock: Callable[[], float] = time.monotonic  # in seconds

    def __post_init__(self) -> None:
        self.stopped = self.in_sync = False  # in_sync: nothing has failed since the last sync
        self.sync_error: str | None = None
        self.wrong_node: ConfigurationError | NodeError | None = None  # ends the agent
        self.last_sync = -math.inf  # when it ended; all times are of the monotonic clock
        self.next_check = self.clock() + self.options.sync_period
        self.source_errors: dict[str, str] = {}
        self.failing_parts: dict[str, str] = {}
        self.kube_proxy: str | None = None  # a kube-proxy that runs on this node, or its leftovers
        self.kube_proxy_runs = False
        self.ports_not_reserved: str | None = None
        self.burst = Bursts(self.inbox, self.clock)
        self.publisher = Publisher(self.options, self.reporter)
        about = self.options, self.cluster, self.node_sync, self.service_sync
        self.canary = CanarySync(*about, self._write_canary, self.clock)
        self.parts_before = (
            self._part("programs", self._load_programs, lambda: self.loader.due),
            self._part("canary", self._withdraw_canary, lambda: self.canary.due),
            self._part("endpoint health", self._look_at_endpoints, self._look_at_endpoints_due),
            self._part("node-local", self._look_at_listeners, lambda: self.node_local.due),
            self._part("sync", self._sync_if_due, self._next_sync),
            self._part("services", self.service_sync.turn, lambda: self.service_sync.due),
        )
        self.parts_after = (
            self._part("engine", self._choose_engine, self._choose_engine_due),
            self._part("audit", self.audit.turn, lambda: self.audit.due),
            self._part("history", self._commit_history),
            self._part("status", self._publish),
        )

    def _part(
        self,
        name: str,
        turn: Callable[[], object],
        due: Callable[[], float] = lambda: math.inf,
    ) -> "_Part":
        return _Part(name, turn, due, self.clock)

    @property
    def status(self) -> AgentStatus:
        return self.publisher.status

    def run(self) -> None:
        """Run the loop.

        Raises CompileError, VerifierError or KernelError if no programs at all can serve,
        ConfigurationError for addresses that do not fit the Node, and NodeError for conntrack
        settings that cannot be set.
        """
        self.device_watch.start()
        try:
            self.loader.load()
            while not self.stopped:
                self._turn()
        finally:
            stopping.run_all(self.canary.withdraw, self.source.stop)
        if self.wrong_node:
            raise self.wrong_node
        if cgroup_links.attached(StateDir(self.options.paths.state)):
            log.info("stopped; the loaded programs and maps keep serving")
        else:
            log.warning("stopped; no programs are pinned, so nothing serves until an agent starts")

    def _turn(self) -> None:
        for message in self._wait():
            self._take(message)
        if self.stopped:
            return
        for part in self.parts_before:
            part.take_turn()
        if self.node_sync.take_new_devices():
            self.stale_udp.check_connections()
            self.uplink_canary.look_at(self.node_sync.uplinks)
        for part in self.parts_after:
            part.take_turn()
        if self.node_sync.attached and self.cluster.complete:
            end_startup()
            self.reporter.turned()

    def _load_programs(self) -> None:
        if self.clock() >= self.loader.due and self.loader.try_again():
            self.node_sync.programs_loaded()
            self.in_sync = False

    def _withdraw_canary(self) -> None:
        if self.clock() >= self.canary.due:
            self.canary.withdraw()

    def _look_at_endpoints(self) -> None:
        if self.cluster.with_passive_health or self.endpoint_health.watching:
            self.endpoint_health.turn()

    def _look_at_endpoints_due(self) -> float:
        return self.endpoint_health.due if self.endpoint_health.watching else math.inf

    def _look_at_listeners(self) -> None:
        if self.cluster.node_local.changed:
            self.node_local.turn()

    def _publish(self) -> None:
        is_in_force = in_force(self.audit.drift) and self.node_sync.is_reached
        self.publisher.publish(make_status(self), in_force=is_in_force)

    def _commit_history(self) -> None:
        if not (self.sync_error or self.service_sync.must_start_over):
            changed, now = self.service_sync.take_changed(), self.service_sync.planner.actual
            keep = self._has_changes() or bool(self.service_sync.backlog)
            self.history.commit(changed, now, keep=keep)

    def _wait(self) -> Iterator[Message]:
        """Yield the messages in the inbox; wait for the first one until something else is due."""
        of_parts = (part.due for part in (*self.parts_before, *self.parts_after))
        most = MOST_TAKING if self.node_sync.attached else math.inf  # a start takes all first
        return self.burst.waiting(max(min(of_parts) - self.clock(), 0.0), most)

    def _take_source(self, source: str, error: str | None) -> None:
        """Take the error of a source, or its recovery.

        An API server is a source for each kind: its error is logged once, and its recovery when it
        has recovered for all kinds.
        """
        self.source_errors.pop(source, None)
        server = _server_of(source)
        others = [it for name, it in self.source_errors.items() if _server_of(name) == server]
        if error:
            self.source_errors[source] = error
            if error not in others:
                log.warning("%s: %s", source, error)
        elif not others:
            log.info("%s: recovered", server)

    def _take(self, message: Message) -> None:
        match message:
            case Together(events):
                for event in events:
                    self._take(event)
            case Replaced() | Changed() | Removed():
                self._take_objects(message)
            case DevicesChanged() | EachPacketRules():
                self._take_of_node(message)
            case DevicesAttached():
                self._take_attached()
            case SourceStatus(source, error):
                self._take_source(source, error)
            case PartStatus(part, error):
                self.failing_parts.pop(part, None)
                if error:
                    self.failing_parts[part] = error
            case Detection():
                found = message._replace(left_to_it=self.options.left_to_kube_proxy)
                self.kube_proxy, self.kube_proxy_runs = found.message, found.running
                if found.log_message:
                    log.warning("%s", found.log_message)
            case Disturbed(check):
                self.audit.wake(check)
                if check == TABLE_NAME:
                    self.stale_udp.check_connections()
            case ConnectionsReset(name, (address, port), kind, count):
                self.history.reset(name, host_port(address, port), f"{count} {kind}")
            case Reached() | Outcomes() | Answering() | Untracked():
                part = f"observed {type(message).__name__.lower()}"
                parts.attempt(part, partial(self._take_seen, message))
            case Call():
                message.answer(self.cluster, self.service_sync.planner, self.canary)
            case Stop():
                self.stopped = True

    def _take_objects(self, event: ObjectEvent) -> None:
        applied = self.cluster.apply(event)
        if isinstance(event, Replaced) and event.kind is Kind.SERVICE:
            self.service_sync.plan_all()  # repairs any fault of the plan, hours apart
        self.reporter.event_applied(applied, self.cluster.node)
        self.history.event(event, applied)

    def _take_seen(self, message: Reached | Outcomes | Answering | Untracked) -> None:
        """Take what this node has seen itself about endpoints and frontends."""
        match message:
            case Reached(places):
                self.cluster.set_reached(places)
                self._free_api_servers()
                self.history.because(API_SERVERS)
            case Outcomes():
                self.endpoint_health.take(message)
            case Answering(listeners):
                self.cluster.set_answering(listeners)
                self.history.because(NODE_LOCAL)
            case Untracked():
                claimants = self.service_sync.planner.claims.claimants
                self.cluster.set_untracked(message, claimants.items())
                self.history.because(UNTRACKED)

    def _has_changes(self) -> bool:
        """Whether there is anything new to write; False before the needed lists are received."""
        services = bool(self.cluster.changed_services) or self._has_backlog
        changed = services or self.node_sync.changed or not self.in_sync
        return self.cluster.complete and changed

    @property
    def _has_backlog(self) -> bool:
        """Whether Services remain to be planned whose namespace may use more processor time now."""
        return self.service_sync.backlog.due <= self.clock()

    def _next_sync(self) -> float:
        """When the next sync is due; infinity means only a message can make one necessary.

        Changes wait for the minimal sync period after a sync (kube-proxy.md 16.2). After a failed
        sync, and for unfinished work, the pause is WRITE_RETRY_SECONDS.
        """
        if self._has_changes() and not self.sync_error:
            pause = 0.0 if self._has_backlog else self.options.min_sync_period
            return self.last_sync + pause
        if self.sync_error or self.node_sync.not_served:
            return self.last_sync + WRITE_RETRY_SECONDS
        return self.service_sync.retry_due

    def _sync_if_due(self) -> None:
        if has_changes := self._has_changes():
            self.reporter.sync_queued()
        if self.clock() >= self._next_sync():
            try:
                self._sync(has_changes=has_changes)
            except (ConfigurationError, NodeError) as error:
                self.wrong_node, self.stopped = error, True
            except Exception:
                self.in_sync = False
                raise
            self.last_sync = self.clock()

    def _sync(self, *, has_changes: bool) -> None:
        """Write the changes, and retry unfinished work.

        If a step fails the others still run; programs are attached only when all have succeeded. A
        sync without changes is not reported. kube-proxy.md 16.7 gives the order at the end.
        """
        full, begun = not self.in_sync, self.clock()
        if full and not self.sync_error:
            self.node_sync.check_families()
        try:
            self.node_sync.require_engine()  # before any write: what is in force keeps serving
            do_all([self._write_node, self.service_sync.write])
            if not self.node_sync.attached:
                self.ports_not_reserved = self.host.make()
                self.node_sync.attach()
                self.service_sync.planner.programs_replaced()
                log.info("serving %d service ports", self.service_sync.service_ports)
        except KernelError as error:
            self._set_error(error)
            self.reporter.sync_failed(self.clock() - begun, full=full)
            return
        self.in_sync, self.sync_error = True, None
        if self.cluster.complete and (found := self.cluster.api_servers()):
            self.api_servers_file.keep(found)
        if has_changes:
            self._report_sync(self.clock() - begun, full=full)
        self._check_stale_udp()
        if full:
            self.stale_udp.check_everything()
        self.on_removal.update(self.service_sync.take_watched(), all_named=full)

    def _check_stale_udp(self) -> None:
        self.stale_udp.check(self.service_sync.planner.take_backend_changes())

    def _write_canary(self, wanted: CanaryPorts) -> str | None:
        self.history.because(CANARY)
        was_in_sync, self.in_sync = self.in_sync, False  # for any exception
        try:
            full = self.service_sync.write_canary(wanted)
        except KernelError as error:
            self._set_error(error)
            raise
        self.in_sync = was_in_sync
        self._check_stale_udp()
        return full

    def _write_node(self) -> None:
        if self.node_sync.changed or self.node_sync.not_served or not self.in_sync:
            self.node_sync.write(self.service_sync.cover_service_cidrs())
            self.uplink_canary.look_at(self.node_sync.uplinks)

    def _take_of_node(self, message: DevicesChanged | EachPacketRules) -> None:
        match message:
            case DevicesChanged():
                self.node_sync.device_list = message
                self.cluster.set_own_addresses(message.addresses)
                self._free_api_servers()
                self.history.because(DEVICES)
            case EachPacketRules():
                self.node_sync.take_each_packet(message)

    def _free_api_servers(self) -> None:
        """Before the first lists: an earlier agent may have let a Service hide the API servers."""
        if self.cluster.complete:
            return
        try:
            self.service_sync.free_api_servers()
        except KernelError as error:
            self._set_error(error)

    def _take_attached(self) -> None:
        try:
            self.node_sync.take_attached()
        except KernelError as error:
            self._set_error(error)

    def _report_sync(self, seconds: float, *, full: bool) -> None:
        self.reporter.synced(
            seconds,
            full=full,
            checks=self.service_sync.health_checks,
            listening=self.node_sync.health_check_addresses,
            no_local=self.service_sync.no_local,
            waiting=self.service_sync.backlog.namespaces,
        )

    def _choose_engine_due(self) -> float:
        return min(self.next_check, self.node_sync.engine.due)

    def _choose_engine(self) -> None:
        """Decide the engine once per sync period, since bridge settings change without an event.

        The engine is also decided when a reason for another engine has lasted long enough.
        """
        if self.clock() >= self._choose_engine_due():
            self.next_check = self.clock() + self.options.sync_period
            self.node_sync.choose_engine()

    def _set_error(self, error: KernelError) -> None:
        """Note a failed write; the next sync is a full one, and may follow in the same turn."""
        if str(error) != self.sync_error:
            log.error("%s; trying again every %g s", error, WRITE_RETRY_SECONDS)
        self.in_sync, self.sync_error = False, str(error)
