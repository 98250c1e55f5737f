# SPDX-License-Identifier: Apache-2.0
"""The audit compares the kernel's state with the plan, and corrects differences.

It runs in the agent's loop, so nothing changes the plan during a comparison. Each check is a
sequence of small steps; a turn takes as many as fit into BUDGET_SECONDS, then messages are handled,
and the check continues PAUSE_SECONDS later. The differences that a turn finds are corrected in the
same turn. Then the check is repeated at once: if nothing differs any more, the drift is no longer
reported.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from ebpflb.agent.engine import NetfilterSync
from ebpflb.agent.loop import Ask, Part
from ebpflb.agent.node_sync import NodeSync
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.cluster.source import Emit, Source, make_source
from ebpflb.errors import ClusterError, EbpflbError, in_words, log_once
from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.netfilter import flowtable
from ebpflb.kernel.netfilter.elements import Change
from ebpflb.kernel.netfilter.table import TABLE
from ebpflb.kernel.netfilter.watch import NatWatch
from ebpflb.model import events
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import (
    MAX_LISTED,
    AuditAnswer,
    AuditReport,
    Changed,
    Disturbed,
    Drift,
    Event,
    Kind,
    Removed,
    Replaced,
    SourceStatus,
    Together,
    named,
)
from ebpflb.model.services import KUBERNETES
from ebpflb.options import REPORT, Options
from ebpflb.plan import comparison
from ebpflb.plan.comparison import Wrong
from ebpflb.serve.agent_lock import AgentLock
from ebpflb.stopping import parts

# The comparisons of the agent's audit.

log = logging.getLogger(__name__)

MAP_PERIODS = 4  # sync periods between two comparisons of the maps
_ENTRIES_A_STEP = 256  # entries in one step
_HASHES = ("services", "service_names", "backend_names", "cluster_ips")
HOOKS_AND_PINS = "hooks and pins"
HOOK_SECONDS = 2.0  # maximum time between two checks of hooks and devices


class HooksCheck:
    """Compare every link, filter and pin, and check that the state directory is ours."""

    name = HOOKS_AND_PINS

    def __init__(self, node_sync: NodeSync, lock: AgentLock, end: Callable[[], None]) -> None:
        """``end`` ends the agent, because another agent has the state directory now."""
        self._node_sync, self._lock, self._end = node_sync, lock, end
        self.period = min(HOOK_SECONDS, node_sync.options.sync_period)

    @property
    def possible(self) -> bool:
        """While devices get their first programs the kernel lets nobody else ask for programs."""
        return self._node_sync.attached and not self._node_sync.datapath.is_attaching

    def steps(self) -> Iterator[Iterable[Drift]]:
        yield self._lock.faults()
        yield from self._node_sync.faults()

    def repair(self) -> None:
        if self._lock.restore():
            self._node_sync.restore()
        else:
            log.error("another agent now serves %s; exiting", self._node_sync.options.paths.state)
            self._end()


class MapsCheck:
    """Compare every entry of the maps that the agent writes."""

    name = "maps"

    def __init__(self, datapath: Datapath, node_sync: NodeSync, service_sync: ServiceSync) -> None:
        self._datapath, self._node_sync, self._service_sync = datapath, node_sync, service_sync
        self.period = MAP_PERIODS * node_sync.options.sync_period
        self._wrong: list[Wrong] = []
        self._node_differs = False

    @property
    def possible(self) -> bool:
        return self._service_sync.complete and not self._node_sync.changed

    def steps(self) -> Iterator[Iterable[Drift]]:
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

    def _node(self) -> Iterator[list[Drift]]:
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
            ids = range(first, min(first + _ENTRIES_A_STEP, slots.spec.entries))
            yield list(comparison.removed_backends(planner, ((id, slots.get(id)) for id in ids)))

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


class TableCheck:
    """Report the repairs of the watch, which checks at once after each removal."""

    name = TABLE_NAME

    def __init__(self, watch: NatWatch, period: float) -> None:
        self._watch, self.period = watch, period
        self._reported = 0

    possible = True

    def steps(self) -> Iterator[list[Drift]]:
        put_back = self._watch.put_back
        if put_back > self._reported:
            yield [Drift(events.Part.TABLE, str(TABLE), _REMOVED)]
        self._reported = put_back
        yield [Drift(events.Part.TABLE, str(TABLE), said) for said in self._watch.lacking]
        differs = self._watch.take_differs()
        yield [Drift(events.Part.FLOWTABLE, str(flowtable.TABLE), said) for said in differs]

    def repair(self) -> None:
        """Do nothing: the watch has already repaired it."""


class ElementsCheck:
    """Compare the element of each backend id; one whose id is in quarantine may still exist."""

    name = ELEMENTS_NAME

    def __init__(self, netfilter: NetfilterSync, service_sync: ServiceSync, period: float) -> None:
        self._netfilter, self._service_sync, self.period = netfilter, service_sync, period
        self._wrong: list[Change] = []

    @property
    def possible(self) -> bool:
        return self._netfilter.active and self._service_sync.complete

    def steps(self) -> Iterator[list[Drift]]:
        self._wrong = []
        for changes in self._netfilter.compare():
            wrong = [each for each in changes if not self._is_quarantined(each)]
            self._wrong += wrong
            yield [Drift(events.Part.TABLE, f"{TABLE}: {each}", "") for each in wrong]

    def repair(self) -> None:
        wrong, self._wrong = self._wrong, []
        self._netfilter.repair(wrong)

    def _is_quarantined(self, change: Change) -> bool:
        id = change.backend_id
        return change.new is None and self._service_sync.planner.knows_backend(id)


BUDGET_SECONDS = 0.01  # of one turn of the loop
PAUSE_SECONDS = 0.1  # until the check continues
SHORT_PAUSE_SECONDS = 0.005  # while doctor waits
IMPOSSIBLE_SECONDS = 1.0  # until asking again whether a check is possible
FIRST_RETRY = 1.0  # seconds after a failure; doubled after each further one, up to the period
SHARE = 20  # a check that took a second rests for this many


class AuditCheck(Protocol):
    """One comparison."""

    name: str

    @property
    def period(self) -> float:
        """Seconds between two comparisons."""

    @property
    def possible(self) -> bool:
        """Whether there is a plan to compare with."""

    def steps(self) -> Iterator[Iterable[Drift]]:
        """Yield the differences, in steps of about a millisecond. Raises EbpflbError or OSError."""

    def repair(self) -> None:
        """Correct the differences found since the last call. Raises EbpflbError, OSError."""


OnDrift = Callable[[list[Drift]], None]
"""Receives the differences that a turn found and earlier turns did not."""


class RepeatedCheck:
    """One check, repeated.

    ``drift`` is the result of the last comparison, plus the differences found meanwhile.
    """

    def __init__(
        self, check: AuditCheck, on_drift: OnDrift, *, report_only: bool, clock: Callable[[], float]
    ) -> None:
        self.check = check
        self.drift: list[Drift] = []
        self.error: str | None = None  # why the last comparison or correction failed
        self.completed = 0  # comparisons
        self.due = clock()
        self._on_drift, self._report_only, self._clock = on_drift, report_only, clock
        self._steps: Iterator[Iterable[Drift]] | None = None
        self._found: list[Drift] = []
        self._spent = 0.0
        self._ended = -math.inf
        self._pause = PAUSE_SECONDS
        self._is_repeated = False
        self._retry = FIRST_RETRY
        self._part = f"audit of the {check.name}"

    def wake(self) -> None:
        """Make the next comparison due now, except for the rest after the last one."""
        rested = self._ended + SHARE * self._spent
        self.due = min(self.due, max(self._clock(), rested))

    def begin_now(self) -> int:
        """Begin a comparison now, with short pauses; return its number."""
        self._steps, self.due, self._pause = None, self._clock(), SHORT_PAUSE_SECONDS
        return self.completed + 1

    def is_missing(self, number: int) -> bool:
        """Whether this comparison, or the one after a correction, will still be made."""
        is_over = self.completed >= number and not self._is_repeated
        return not (is_over or self.error) and self.check.possible

    def turn(self) -> None:
        if not self.check.possible:
            self._steps, self.due = None, self._clock() + IMPOSSIBLE_SECONDS
            return
        begun = self._clock()
        try:
            found, ended = self._compare(begun)
            self._handle(found)
        except (EbpflbError, OSError) as error:
            self._fail(error)
            return
        except Exception as error:
            self._fail(error)
            parts.failed(self._part, error)
            return
        self._spent += self._clock() - begun
        if ended:
            self._complete()
        else:
            self.due = self._clock() + self._pause

    def _compare(self, begun: float) -> tuple[list[Drift], bool]:
        """Return the differences found in one turn, and whether the last step was reached."""
        if self._steps is None:
            self._steps, self._found, self._spent = self.check.steps(), [], 0.0
        found: list[Drift] = []
        for drifts in self._steps:
            found += drifts
            if self._clock() - begun > BUDGET_SECONDS:
                return found, False
        return found, True

    def _handle(self, found: list[Drift]) -> None:
        if not found:
            return
        new = [each for each in found if each not in self.drift]
        self._found += found
        self.drift += new
        if new:
            verb = "found" if self._report_only else "found, repairing it now"
            log.warning("audit: %s: %s", verb, events.summary(new))
            self._on_drift(new)
        if not self._report_only:
            self.check.repair()

    def _complete(self) -> None:
        """End a comparison; after a correction the next one begins at once, but only once."""
        if self.drift and not self._found:
            log.info("audit: the %s are as planned again", self.check.name)
        self.drift, self.error, self._steps = self._found, None, None
        parts.succeeded(self._part)
        self._retry, self._pause = FIRST_RETRY, PAUSE_SECONDS
        self.completed, self._ended = self.completed + 1, self._clock()
        self._is_repeated = bool(self._found) and not self._report_only and not self._is_repeated
        rest = 0.0 if self._is_repeated else max(self.check.period, SHARE * self._spent)
        self.due = self._clock() + rest

    def _fail(self, error: Exception) -> None:
        line = f"audit: the {self.check.name} cannot be compared or repaired: %s"
        self.error = log_once(log.error, line, in_words(error), self.error)
        self._steps, self._is_repeated = None, False
        self.due = self._clock() + min(self._retry, self.check.period)
        self._retry = min(2 * self._retry, self.check.period)


class Audit(Part):
    """All checks."""

    name = "audit"
    takes = (Disturbed,)

    def __init__(
        self,
        checks: Sequence[AuditCheck],
        on_drift: OnDrift,
        *,
        report_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``report_only``: nothing is corrected. ``clock`` is a monotonic clock, in seconds."""
        self.passes = {
            check.name: RepeatedCheck(check, on_drift, report_only=report_only, clock=clock)
            for check in checks
        }
        self._clock = clock

    @property
    def due(self) -> float:
        """When ``turn`` has something to do, by the clock."""
        return min(each.due for each in self.passes.values())

    def take(self, message: Disturbed) -> None:
        """Note that something may be gone that a check compares."""
        if message.check in self.passes:
            self.passes[message.check].wake()

    def status(self) -> Mapping[str, Any]:
        return {"drift": named(self.drift), "audit_errors": self.errors}

    def begin_now(self) -> dict[str, int]:
        """Begin all comparisons now; return their numbers."""
        return {name: each.begin_now() for name, each in self.passes.items()}

    def unfinished(self, wanted: Mapping[str, int]) -> list[str]:
        """Return the checks that have not made these numbers of comparisons yet, but can."""
        return [name for name, each in self.passes.items() if each.is_missing(wanted[name])]

    def turn(self) -> None:
        for each in self.passes.values():
            if each.due <= self._clock():
                each.turn()

    @property
    def drift(self) -> list[Drift]:
        """All known differences."""
        return [found for each in self.passes.values() for found in each.drift]

    @property
    def errors(self) -> dict[str, str]:
        """Check -> why it cannot compare, or cannot correct a difference."""
        return {name: each.error for name, each in self.passes.items() if each.error}


# The audit for `ebpflb doctor`: the cluster's objects, then everything that the audit compares.
#
# A fresh list of the agent's own source is compared with the objects that the loop has. An event
# may be on its way, so only what differs twice counts, and only if no event has come in between.

LIST_SECONDS = 30.0
AGAIN_SECONDS = 1.0  # until what differs is compared again
CHECK_SECONDS = 10.0  # for the checks of the audit; in a large cluster they take longer
POLL_SECONDS = 0.1
KEPT_SECONDS = 5.0  # for a doctor that asks again; then its result is of the past
_NAME = "doctor audit"
_NOT_NEEDED = "/servicecidrs"  # older roles do not allow them

_Objects = Mapping[str, object]  # by kind and name


class _Differing(NamedTuple):
    """How an object differs, and the agent's copy of it."""

    how: str
    ours: object


class DoctorAudit(Part):
    """``differ``: object -> how the agent's copy differs; written by the loop."""

    def __init__(self, options: Options, ask: Ask, cluster: ClusterState, audit: Audit) -> None:
        """``ask`` belongs to the inbox."""
        self.differ: Mapping[str, str] = {}
        self._options, self._ask, self._cluster, self._audit = options, ask, cluster, audit
        self._thread: threading.Thread | None = None
        self._made: tuple[float, AuditReport] | None = None

    name = _NAME

    def status(self) -> Mapping[str, Any]:
        return {"objects_differ": self.differ}

    def poll(self) -> AuditAnswer:
        """Return the report that is ready; if there is none, one is being made from now on."""
        made, self._made = self._made, None
        if made and time.monotonic() - made[0] < KEPT_SECONDS:
            return AuditAnswer(made[1])
        if not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
            self._thread.start()
        return AuditAnswer()

    def _run(self) -> None:
        def make() -> None:
            with suppress(TimeoutError):  # the loop does not answer: doctor asks again
                self._made = time.monotonic(), self.report()

        parts.attempt(_NAME, make)

    def report(self) -> AuditReport:
        """Compare now. Raises TimeoutError if the loop does not answer."""
        not_listed = self._compare_objects()
        wanted = self._ask(self._audit.begin_now)
        until = time.monotonic() + CHECK_SECONDS
        while self._ask(lambda: self._audit.unfinished(wanted)):
            if time.monotonic() >= until:
                break
            time.sleep(POLL_SECONDS)
        return self._ask(lambda: self._report(wanted, not_listed))

    def _report(self, wanted: Mapping[str, int], not_listed: str) -> AuditReport:
        audit = self._audit
        return AuditReport(
            drift=audit.drift[:MAX_LISTED],
            errors=audit.errors,
            unfinished=audit.unfinished(wanted),
            objects=dict(self.differ),
            not_listed=not_listed,
            repairs=self._options.audit != REPORT,
        )

    def _compare_objects(self) -> str:
        """Compare the objects; return why they could not be listed, or ""."""
        try:
            found = self._differing()
            if found:
                time.sleep(AGAIN_SECONDS)
                before, found = found, self._differing()
                found = {
                    name: it
                    for name, it in found.items()
                    if name in before and before[name].ours is it.ours
                }
        except ClusterError as error:
            return str(error)
        differ = {name: it.how for name, it in islice(found.items(), MAX_LISTED)}
        self._ask(lambda: setattr(self, "differ", differ))
        return ""

    def _differing(self) -> dict[str, _Differing]:
        """Return the objects that differ from a fresh list. Raises ClusterError, TimeoutError."""
        fresh = _copy(listed(self._options))
        ours = self._ask(lambda: _copy(self._cluster))
        return {
            name: _Differing(_difference(ours.get(name), fresh.get(name)), ours.get(name))
            for name in sorted(ours.keys() | fresh.keys())
            if ours.get(name) != fresh.get(name)
        }


def _copy(cluster: ClusterState) -> _Objects:
    """Return the valid objects; slices of the API servers may be held back on purpose."""
    valid = cluster.invalid.keys()
    found: dict[str, object] = {
        f"Service {key}": ports
        for key, ports in cluster.services.items()
        if (Kind.SERVICE, key) not in valid
    }
    for key, stored in cluster.slices.items():
        if stored.service != KUBERNETES and (Kind.ENDPOINT_SLICE, key) not in valid:
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
    cluster = ClusterState(
        options.node_name, bind_address=options.bind_address, admission=options.admission
    )
    inbox = SimpleQueue[Event | Together]()
    source = _source(options, inbox.put)
    source.start()
    try:
        _receive(inbox, cluster, options.source)
    finally:
        source.stop()
    return cluster


def _source(options: Options, emit: Emit) -> Source:
    name = options.node_name
    if options.manifests:
        return make_source(emit, node_name=name, manifests=options.manifests)
    from ebpflb.cluster.api_servers import ApiServers
    from ebpflb.cluster.list_watch import NEWEST

    return make_source(
        emit,
        node_name=name,
        manifests=None,
        kubeconfig=options.kubeconfig,
        master=options.master,
        servers=ApiServers(options.api_servers),
        first_version=NEWEST,
    )


def _receive(inbox: SimpleQueue[Event | Together], cluster: ClusterState, source: str) -> None:
    until, reason = time.monotonic() + LIST_SECONDS, "no answer"
    while not cluster.complete:
        try:
            event = inbox.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            raise ClusterError(f"{source} cannot be listed: {reason}") from None
        for each in event.events if isinstance(event, Together) else (event,):
            if isinstance(each, Replaced | Changed | Removed):
                cluster.apply(each)
            elif isinstance(each, SourceStatus):
                reason = each.error or reason
                is_needed = not each.source.endswith(_NOT_NEEDED)
                until = -math.inf if each.is_forbidden and is_needed else until
