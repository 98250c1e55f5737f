# SPDX-License-Identifier: Apache-2.0
"""The audit: what is in the kernel is compared with what is planned, and what differs is put back.

It runs in the agent's loop, so nothing changes the plan while it compares. Each check is a sequence
of small steps; a turn takes as many as fit into BUDGET_SECONDS, then messages are handled, and the
check goes on PAUSE_SECONDS later. What a turn finds is put back in the same turn. Then the check is
repeated at once: it ends what is reported as drift, if nothing differs any more.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from ebpflb.agent.netfilter_sync import NetfilterSync
from ebpflb.agent.node_sync import NodeSync
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.errors import EbpflbError, in_words
from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.netfilter import flowtable
from ebpflb.kernel.netfilter.elements import Change
from ebpflb.kernel.netfilter.rules import TABLE
from ebpflb.kernel.netfilter.watch import NatWatch
from ebpflb.model import drift
from ebpflb.model.drift import Drift, Part
from ebpflb.plan import comparison
from ebpflb.plan.comparison import Wrong
from ebpflb.serve.agent_lock import AgentLock

# What the agent's audit compares.

log = logging.getLogger(__name__)

MAP_PERIODS = 4  # sync periods from one comparison of the maps to the next
_ENTRIES_A_STEP = 256  # entries in one step
_HASHES = ("services", "service_names", "backend_names", "cluster_ips")
HOOKS_AND_PINS = "hooks and pins"
HOOK_SECONDS = 2.0  # from one look at hooks and devices to the next, at the longest


class HooksCheck:
    """Every link, filter and pin: attached, ours, and there; and the state directory is ours."""

    name = HOOKS_AND_PINS

    def __init__(self, node_sync: NodeSync, lock: AgentLock, end: Callable[[], None]) -> None:
        """``end`` ends the agent: another one has the state directory now."""
        self._node_sync, self._lock, self._end = node_sync, lock, end
        self.period = min(HOOK_SECONDS, node_sync.options.sync_period)

    @property
    def possible(self) -> bool:
        return self._node_sync.attached

    def steps(self) -> Iterator[Iterable[Drift]]:
        yield self._lock.faults()
        yield from self._node_sync.faults()

    def repair(self) -> None:
        if self._lock.restore():
            self._node_sync.restore()
        else:
            log.error("another agent serves %s now: ending", self._node_sync.options.paths.state)
            self._end()


class MapsCheck:
    """Every entry of the maps that the agent writes."""

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
        """Ends where the services are planned anew from what the maps hold."""
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
        """Forwards by what is planned, then backwards by what is there."""
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
        """A look-up would find a shorter prefix, so what is missing is known when all is read."""
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


# The audit of the nft table of the engine netfilter: its rules, and its elements.

TABLE_NAME, ELEMENTS_NAME = "netfilter table", "netfilter elements"
_REMOVED = "had been removed or changed by another program"


class TableCheck:
    """The watch looks at once after a removal, and puts back itself; here that is reported."""

    name = TABLE_NAME

    def __init__(self, watch: NatWatch, period: float) -> None:
        self._watch, self.period = watch, period
        self._reported = 0

    possible = True

    def steps(self) -> Iterator[list[Drift]]:
        put_back = self._watch.put_back
        if put_back > self._reported:
            yield [Drift(Part.TABLE, str(TABLE), _REMOVED)]
        self._reported = put_back
        yield [Drift(Part.TABLE, str(TABLE), said) for said in self._watch.lacking]
        differs = self._watch.take_differs()
        yield [Drift(Part.FLOWTABLE, str(flowtable.TABLE), said) for said in differs]

    def repair(self) -> None:
        """The watch has done it already."""


class ElementsCheck:
    """An element for each backend id; one whose id is in quarantine may still be there."""

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
            yield [Drift(Part.TABLE, f"{TABLE}: {each}", "") for each in wrong]

    def repair(self) -> None:
        wrong, self._wrong = self._wrong, []
        self._netfilter.repair(wrong)

    def _is_quarantined(self, change: Change) -> bool:
        id = change.backend_id
        return change.new is None and id in self._service_sync.planner.backend_ids.used


BUDGET_SECONDS = 0.01  # of one turn of the loop
PAUSE_SECONDS = 0.1  # until the next turn goes on
IMPOSSIBLE_SECONDS = 1.0  # until it is asked again whether a check is possible
FIRST_RETRY = 1.0  # seconds after a failure; each further one doubles them, up to the period
SHARE = 20  # a check that takes a second is not begun again for this many


class AuditCheck(Protocol):
    """One thing to be compared."""

    name: str

    @property
    def period(self) -> float:
        """Seconds from one comparison to the next."""

    @property
    def possible(self) -> bool:
        """Whether there is anything planned now that could be compared."""

    def steps(self) -> Iterator[Iterable[Drift]]:
        """What differs, in steps of about a millisecond. Raises EbpflbError or OSError."""

    def repair(self) -> None:
        """Puts back what the steps since the last call have found. Raises EbpflbError, OSError."""


OnDrift = Callable[[list[Drift]], None]
"""Receives what a turn has found and what the turns before had not."""


class RepeatedCheck:
    """One check, again and again.

    ``drift`` is what the last comparison found; what is found meanwhile is added to it.
    """

    def __init__(
        self, check: AuditCheck, on_drift: OnDrift, *, report_only: bool, clock: Callable[[], float]
    ) -> None:
        self.check = check
        self.drift: list[Drift] = []
        self.error: str | None = None  # why the last comparison, or putting back, has failed
        self.completed = 0  # comparisons
        self.due = clock()
        self._on_drift, self._report_only, self._clock = on_drift, report_only, clock
        self._steps: Iterator[Iterable[Drift]] | None = None
        self._found: list[Drift] = []
        self._spent = 0.0
        self._ended = -math.inf
        self._is_repeated = False
        self._retry = FIRST_RETRY

    def wake(self) -> None:
        """The next comparison is due now, but for what the last one took of the time."""
        rested = self._ended + SHARE * self._spent
        self.due = min(self.due, max(self._clock(), rested))

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
        self._spent += self._clock() - begun
        if ended:
            self._complete()
        else:
            self.due = self._clock() + PAUSE_SECONDS

    def _compare(self, begun: float) -> tuple[list[Drift], bool]:
        """What the steps of one turn find, and whether the last one was among them."""
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
            verb = "found" if self._report_only else "found, and is put back"
            log.warning("audit: %s: %s", verb, drift.summary(new))
            self._on_drift(new)
        if not self._report_only:
            self.check.repair()

    def _complete(self) -> None:
        """After something was put back the next comparison begins at once, but only once."""
        if self.drift and not self._found:
            log.info("audit: the %s are as planned again", self.check.name)
        self.drift, self.error, self._steps = self._found, None, None
        self._retry = FIRST_RETRY
        self.completed, self._ended = self.completed + 1, self._clock()
        self._is_repeated = bool(self._found) and not self._report_only and not self._is_repeated
        rest = 0.0 if self._is_repeated else max(self.check.period, SHARE * self._spent)
        self.due = self._clock() + rest

    def _fail(self, error: EbpflbError | OSError) -> None:
        reason = in_words(error)
        if reason != self.error:
            log.error("audit: the %s: %s", self.check.name, reason)
        self.error, self._steps, self._is_repeated = reason, None, False
        self.due = self._clock() + min(self._retry, self.check.period)
        self._retry = min(2 * self._retry, self.check.period)


class Audit:
    """All checks. ``turn`` is called by the loop, in each of its turns."""

    def __init__(
        self,
        checks: Sequence[AuditCheck],
        on_drift: OnDrift,
        *,
        report_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``report_only``: nothing is put back. ``clock`` is a monotonic one, in seconds."""
        self.passes = {
            check.name: RepeatedCheck(check, on_drift, report_only=report_only, clock=clock)
            for check in checks
        }
        self._clock = clock

    @property
    def due(self) -> float:
        """When ``turn`` has something to do, by the clock."""
        return min(each.due for each in self.passes.values())

    def wake(self, check: str) -> None:
        """Something of what this check compares may be gone."""
        if check in self.passes:
            self.passes[check].wake()

    def turn(self) -> None:
        for each in self.passes.values():
            if each.due <= self._clock():
                each.turn()

    @property
    def drift(self) -> list[Drift]:
        """What differs, as far as is known."""
        return [found for each in self.passes.values() for found in each.drift]

    @property
    def errors(self) -> dict[str, str]:
        """Check -> why it cannot compare, or not put back what it found."""
        return {name: each.error for name, each in self.passes.items() if each.error}
