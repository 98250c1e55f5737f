# SPDX-License-Identifier: Apache-2.0
"""The audit compares the kernel's state with the plan, and corrects differences.

It runs in the agent's loop, so nothing changes the plan during a comparison. Each check is a
sequence of small steps; a turn takes as many as fit into BUDGET_SECONDS, then messages are handled,
and the check continues PAUSE_SECONDS later. The differences that a turn finds are corrected in the
same turn. A second later the check is repeated: if nothing differs any more, the drift is no longer
reported.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from ebpflb.agent.engine import NetfilterSync
from ebpflb.agent.loop import Inbox, Part
from ebpflb.agent.node_sync import NodeSync
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.cluster.api_servers import ApiServers
from ebpflb.cluster.source import ServerOptions, make_source
from ebpflb.errors import ClusterError, EbpflbError, in_words, log_once
from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.netfilter import flowtable
from ebpflb.kernel.netfilter.elements import Change
from ebpflb.kernel.netfilter.table import TABLE
from ebpflb.kernel.netfilter.watch import NatWatch
from ebpflb.model import events
from ebpflb.model.cluster_state import ClusterState
from ebpflb.options import REPORT, Options
from ebpflb.plan import comparison
from ebpflb.plan.comparison import Wrong
from ebpflb.serve.status import AgentLock
from ebpflb.stopping import parts

log = logging.getLogger(__name__)

BUDGET_SECONDS = 0.01  # of one turn of the loop
PAUSE_SECONDS, SHORT_PAUSE_SECONDS = 0.1, 0.005  # until the check continues; while doctor waits
RETRY_SECONDS = 1.0  # after a failure or correction, or while there is nothing to compare with
SHARE = 20  # a check that took a second rests for this many

OnDrift = Callable[[list[events.Drift]], None]
"""Receives the differences that a turn found and earlier turns did not."""


class Check(ABC):
    """One comparison, repeated every ``period`` seconds.

    ``drift`` is the result of the last comparison, plus the differences found meanwhile. ``due`` is
    when ``turn`` has something to do, by the audit's clock.
    """

    name: ClassVar[str]

    def __init__(self, period: float) -> None:
        self.period = period
        self.drift: list[events.Drift] = []
        self.error: str | None = None  # why the last comparison or correction failed
        self.completed = 0  # comparisons
        self.due = self._rests_until = 0.0
        self.is_asked_for = False  # doctor waits for a comparison without corrections
        self._running: Iterator[Iterable[events.Drift]] | None = None
        self._found: list[events.Drift] = []
        self._spent = 0.0

    @property
    def possible(self) -> bool:
        """Whether there is a plan to compare with."""
        return True

    @abstractmethod
    def steps(self) -> Iterator[Iterable[events.Drift]]:
        """Yield the differences, in steps of about a millisecond. Raises EbpflbError or OSError."""

    @abstractmethod
    def repair(self) -> None:
        """Correct the differences found since the last call. Raises EbpflbError, OSError."""

    def wake(self, now: float) -> None:
        """Make the next comparison due now, or when the pause after the last one ends."""
        self.due = min(self.due, max(now, self._rests_until))

    def begin_now(self, now: float) -> None:
        """Begin a comparison now, with short pauses."""
        self._running, self.due, self.is_asked_for = None, now, True

    def turn(self, clock: Callable[[], float], on_drift: OnDrift, *, report_only: bool) -> None:
        if not self.possible:
            self._running, self.due = None, clock() + RETRY_SECONDS
            return
        begun, part = clock(), f"audit of the {self.name}"
        try:
            found, ended = self._compare(clock, begun)
            if found:
                self._handle(found, on_drift, report_only=report_only)
        except Exception as error:
            self._fail(error, clock())
            if not isinstance(error, EbpflbError | OSError):
                parts.failed(part, error)
            return
        parts.succeeded(part)
        now = clock()
        self._spent += now - begun
        self.due = now + (SHORT_PAUSE_SECONDS if self.is_asked_for else PAUSE_SECONDS)
        if ended:
            self._complete(now, is_repeated=bool(self._found) and not report_only)

    def _compare(self, clock: Callable[[], float], begun: float) -> tuple[list[events.Drift], bool]:
        """Return the differences found in one turn, and whether the last step was reached."""
        if self._running is None:
            self._running, self._found, self._spent = self.steps(), [], 0.0
        found: list[events.Drift] = []
        for drifts in self._running:
            found += drifts
            if clock() - begun > BUDGET_SECONDS:
                return found, False
        return found, True

    def _handle(self, found: list[events.Drift], on_drift: OnDrift, *, report_only: bool) -> None:
        new = [each for each in found if each not in self.drift]
        self._found += found
        self.drift += new
        if new:
            verb = "found" if report_only else "found, repairing it now"
            log.warning("audit: %s: %s", verb, events.summary(new))
            on_drift(new)
        if not report_only:
            self.repair()

    def _complete(self, now: float, *, is_repeated: bool) -> None:
        if self.drift and not self._found:
            log.info("audit: the %s are as planned again", self.name)
        self.drift, self.error, self._running = self._found, None, None
        self.is_asked_for &= is_repeated
        self.completed, self._rests_until = self.completed + 1, now + SHARE * self._spent
        pause = min(RETRY_SECONDS, self.period) if is_repeated else self.period
        self.due = max(now + pause, self._rests_until)

    def _fail(self, error: Exception, now: float) -> None:
        line = f"audit: the {self.name} cannot be compared or repaired: %s"
        self.error = log_once(log.error, line, in_words(error), self.error)
        self._running, self.is_asked_for = None, False
        self.due = now + min(RETRY_SECONDS, self.period)


MAP_PERIODS = 4  # sync periods between two comparisons of the maps
_ENTRIES_A_STEP = 256  # entries in one step
_HASHES = ("services", "service_names", "backend_names", "cluster_ips")
HOOK_SECONDS = 2.0  # maximum time between two checks of hooks and devices


class HooksCheck(Check):
    """Compare every link, filter and pin, and check that the state directory is ours."""

    name = "hooks and pins"

    def __init__(self, node_sync: NodeSync, lock: AgentLock, end: Callable[[], None]) -> None:
        """``end`` ends the agent, because another agent has the state directory now."""
        super().__init__(min(HOOK_SECONDS, node_sync.options.sync_period))
        self._node_sync, self._lock, self._end = node_sync, lock, end

    @property
    def possible(self) -> bool:
        """False while devices get their first programs: the kernel then delays all queries."""
        return self._node_sync.attached and not self._node_sync.datapath.is_attaching

    def steps(self) -> Iterator[Iterable[events.Drift]]:
        yield self._lock.faults()
        yield from self._node_sync.faults()

    def repair(self) -> None:
        if self._lock.restore():
            self._node_sync.restore()
        else:
            log.error("another agent now serves %s; exiting", self._node_sync.options.paths.state)
            self._end()


class MapsCheck(Check):
    """Compare every entry of the maps that the agent writes."""

    name = "maps"

    def __init__(self, datapath: Datapath, node_sync: NodeSync, service_sync: ServiceSync) -> None:
        super().__init__(MAP_PERIODS * node_sync.options.sync_period)
        self._datapath, self._node_sync, self._service_sync = datapath, node_sync, service_sync
        self._wrong: list[Wrong] = []
        self._node_differs = False

    @property
    def possible(self) -> bool:
        return self._service_sync.complete and not self._node_sync.changed

    def steps(self) -> Iterator[Iterable[events.Drift]]:
        """Yield the differences.

        End if the services are planned again from the content of the maps.
        """
        planner = self._service_sync.planner
        self._wrong, self._node_differs = [], False
        yield from self._node()
        for wrong in self._services():
            if self._service_sync.planner is not planner:
                return
            self._wrong += wrong
            yield [each.drift for each in wrong]

    def repair(self) -> None:
        wrong, self._wrong = self._wrong, []
        if self._node_differs:
            self._node_differs = False
            self._node_sync.repair(self._service_sync.cover_service_cidrs())
        if wrong:
            self._datapath.apply(comparison.corrections(wrong))

    def _node(self) -> Iterator[list[events.Drift]]:
        for drifts in self._node_sync.differences(self._service_sync.cover_service_cidrs):
            self._node_differs |= bool(drifts)
            yield drifts

    def _services(self) -> Iterator[list[Wrong]]:
        """Compare forwards by the plan, then backwards by the content of the maps."""
        planner, maps = self._service_sync.planner, self._datapath.maps
        read = {name: opened.get for name, opened in maps.items()}
        for port in list(planner.actual):
            for wrong in comparison.compare_service(planner, port, read):
                yield [wrong] if wrong else []
        for name in _HASHES:
            for keys, _ in maps[name].slices(_ENTRIES_A_STEP):
                yield list(comparison.surplus(planner, name, _unpacked(maps[name], keys)))
        yield from self._source_ranges()
        slots = maps["backend_slots"]
        for first in range(0, slots.spec.entries, _ENTRIES_A_STEP):
            found = slots.get_range(first, min(_ENTRIES_A_STEP, slots.spec.entries - first))
            yield list(comparison.removed_backends(planner, enumerate(found, first)))

    def _source_ranges(self) -> Iterator[list[Wrong]]:
        """Compare all entries: a look-up would find a shorter prefix instead of a missing entry."""
        planner, opened = self._service_sync.planner, self._datapath.maps["source_ranges"]
        planned, seen = planner.source_ranges.snapshot(), set[object]()
        for packed_keys, packed_values in opened.slices(_ENTRIES_A_STEP):
            found: dict[Any, int] = dict(opened.unpacked(packed_keys, packed_values))
            seen |= found.keys()
            yield list(comparison.present_source_ranges(planner, found))
        for first in range(0, len(planned.ranges), _ENTRIES_A_STEP):
            part = planned._replace(ranges=planned.ranges[first : first + _ENTRIES_A_STEP])
            yield list(comparison.missing_source_ranges(planner, part, seen))


def _unpacked(opened: Map, keys: bytes) -> list[object]:
    size = opened.spec.key_size
    return [opened.key.unpack(keys[at : at + size]) for at in range(0, len(keys), size)]


# The audit of the netfilter engine's nft table: its rules, and its elements.

TABLE_NAME, ELEMENTS_NAME = "netfilter table", "netfilter elements"
_REMOVED = "had been removed or changed by another program"


class TableCheck(Check):
    """Report the repairs of the watch, which checks at once after each removal."""

    name = TABLE_NAME

    def __init__(self, watch: NatWatch, period: float) -> None:
        super().__init__(period)
        self._watch, self._reported = watch, 0

    def steps(self) -> Iterator[list[events.Drift]]:
        put_back = self._watch.put_back
        if put_back > self._reported:
            yield [events.Drift(events.Part.TABLE, str(TABLE), _REMOVED)]
        self._reported = put_back
        yield [events.Drift(events.Part.TABLE, str(TABLE), said) for said in self._watch.lacking]
        differs = self._watch.take_differs()
        yield [events.Drift(events.Part.FLOWTABLE, str(flowtable.TABLE), said) for said in differs]

    def repair(self) -> None:
        """Do nothing: the watch has already repaired it."""


class ElementsCheck(Check):
    """Compare the element of each backend id; one whose id is in quarantine may still exist."""

    name = ELEMENTS_NAME

    def __init__(self, netfilter: NetfilterSync, service_sync: ServiceSync, period: float) -> None:
        super().__init__(period)
        self._netfilter, self._service_sync = netfilter, service_sync
        self._wrong: list[Change] = []

    @property
    def possible(self) -> bool:
        return self._netfilter.active and self._service_sync.complete

    def steps(self) -> Iterator[list[events.Drift]]:
        self._wrong = []
        for changes in self._netfilter.compare():
            wrong = [each for each in changes if not self._is_quarantined(each)]
            self._wrong += wrong
            yield [events.Drift(events.Part.TABLE, f"{TABLE}: {each}", "") for each in wrong]

    def repair(self) -> None:
        wrong, self._wrong = self._wrong, []
        self._netfilter.repair(wrong)

    def _is_quarantined(self, change: Change) -> bool:
        id = change.backend_id
        return change.new is None and self._service_sync.planner.knows_backend(id)


class Audit(Part):
    """All checks."""

    name = "audit"
    takes = (events.Disturbed,)

    def __init__(
        self,
        checks: Sequence[Check],
        on_drift: OnDrift,
        *,
        report_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``report_only``: nothing is corrected. ``clock`` is a monotonic clock, in seconds."""
        self.checks, self._clock = checks, clock
        self._on_drift, self._report_only = on_drift, report_only

    @property
    def due(self) -> float:
        return min(each.due for each in self.checks)

    def take(self, message: events.Disturbed) -> None:
        """Note that an object which a check compares may have been removed."""
        for each in self.checks:
            if each.name == message.check:
                each.wake(self._clock())

    def status(self) -> Mapping[str, Any]:
        return {"drift": events.named(self.drift), "audit_errors": self.errors}

    def begin_now(self) -> None:
        """Begin all comparisons now."""
        for each in self.checks:
            each.begin_now(self._clock())

    @property
    def unfinished(self) -> list[str]:
        """The checks that can compare, but have not done so since ``begin_now``."""
        return [each.name for each in self.checks if each.is_asked_for and each.possible]

    def turn(self) -> None:
        for each in self.checks:
            if each.due <= self._clock():
                each.turn(self._clock, self._on_drift, report_only=self._report_only)

    @property
    def drift(self) -> list[events.Drift]:
        """All known differences."""
        return [found for each in self.checks for found in each.drift]

    @property
    def errors(self) -> dict[str, str]:
        """Check -> why it cannot compare, or cannot correct a difference."""
        return {each.name: each.error for each in self.checks if each.error}


# The audit for `ebpflb doctor`: the cluster's objects, then everything that the audit compares.
#
# A fresh list of the agent's own source is compared with the objects that the loop has. An event
# may be on its way, so only what differs twice counts, and only if no event has come in between.

LIST_SECONDS = 30.0
AGAIN_SECONDS = 1.0  # until what differs is compared again
CHECK_SECONDS = 10.0  # for the checks of the audit; in a large cluster they take longer
POLL_SECONDS = 0.1
_NOT_NEEDED = "/servicecidrs"  # older roles do not allow them

_Objects = Mapping[str, object]  # by kind and name


class DoctorAudit(Part):
    """``differ``: object -> how the agent's copy differs; written by the loop."""

    name = "doctor audit"

    def __init__(self, options: Options, inbox: Inbox, cluster: ClusterState, audit: Audit) -> None:
        self.differ: Mapping[str, str] = {}
        self._options, self._ask, self._cluster, self._audit = options, inbox.ask, cluster, audit

    def status(self) -> Mapping[str, Any]:
        return {"objects_differ": self.differ}

    def report(self) -> events.AuditReport:
        """Compare now. Raises TimeoutError if the loop does not answer."""
        not_listed = self._compare_objects()
        self._ask(self._audit.begin_now)
        until = time.monotonic() + CHECK_SECONDS
        while self._ask(lambda: self._audit.unfinished) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return self._ask(lambda: self._report(not_listed))

    def _report(self, not_listed: str) -> events.AuditReport:
        audit = self._audit
        return events.AuditReport(
            drift=audit.drift[: events.MAX_LISTED],
            errors=audit.errors,
            unfinished=audit.unfinished,
            objects=dict(self.differ),
            not_listed=not_listed,
            repairs=self._options.audit != REPORT,
        )

    def _compare_objects(self) -> str:
        """Compare the objects; return why they could not be listed, or ""."""
        try:
            before = found = self._differing()
            if found:
                time.sleep(AGAIN_SECONDS)
                found = self._differing()
        except ClusterError as error:
            return str(error)
        differ = {
            name: _difference(ours, fresh)
            for name, (ours, fresh) in sorted(found.items())
            if name in before and before[name][0] is ours
        }
        differ = dict(islice(differ.items(), events.MAX_LISTED))
        self._ask(lambda: setattr(self, "differ", differ))
        return ""

    def _differing(self) -> dict[str, tuple[object, object]]:
        """Return the agent's copy and that of a fresh list, of each object that differs.

        Raises ClusterError, TimeoutError.
        """
        fresh = _copy(listed(self._options))
        ours = self._ask(lambda: _copy(self._cluster))
        pairs = {name: (ours.get(name), fresh.get(name)) for name in ours.keys() | fresh.keys()}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _copy(cluster: ClusterState) -> _Objects:
    """Return the valid objects."""
    valid = cluster.invalid.keys()
    found: dict[str, object] = {
        f"Service {key}": ports
        for key, ports in cluster.services.items()
        if (events.Kind.SERVICE, key) not in valid
    }
    for key, stored in cluster.slices.items():
        if (events.Kind.ENDPOINT_SLICE, key) not in valid:
            found[f"EndpointSlice {key}"] = stored
    return found | ({f"Node {cluster.node_name}": cluster.node} if cluster.node else {})


def _difference(ours: object, fresh: object) -> str:
    if ours is None:
        return "the agent does not know it"
    if fresh is None:
        return "was deleted, but the agent still has it"
    return "the agent has an outdated copy"


def listed(options: Options) -> ClusterState:
    """Return the state of the cluster by a fresh list.

    Raises ClusterError, with the last reason, if the lists are not complete within LIST_SECONDS,
    and as soon as a list that is needed is forbidden.
    """
    from ebpflb.cluster.list_watch import NEWEST  # only doctor needs it here

    cluster = ClusterState(
        options.node_name, bind_address=options.bind_address, admission=options.admission
    )
    inbox = SimpleQueue[events.Event | events.Together]()
    server = ServerOptions(options.kubeconfig, options.master, ApiServers(options.api_servers))
    source = make_source(
        inbox.put,
        node_name=options.node_name,
        manifests=options.manifests,
        server_options=server,
        first_version=NEWEST,
    )
    source.start()
    try:
        _receive(inbox, cluster, options.source)
    finally:
        source.stop()
    return cluster


def _receive(
    inbox: SimpleQueue[events.Event | events.Together], cluster: ClusterState, source: str
) -> None:
    until, reason = time.monotonic() + LIST_SECONDS, "no answer"
    while not cluster.complete:
        try:
            event = inbox.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            raise ClusterError(f"{source} cannot be listed: {reason}") from None
        for each in event.events if isinstance(event, events.Together) else (event,):
            if isinstance(each, events.Replaced | events.Changed | events.Removed):
                cluster.apply(each)
            elif isinstance(each, events.SourceStatus):
                reason = each.error or reason
                is_needed = not each.source.endswith(_NOT_NEEDED)
                until = -math.inf if each.is_forbidden and is_needed else until
