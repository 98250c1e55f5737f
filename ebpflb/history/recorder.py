# SPDX-License-Identifier: Apache-2.0
"""The agent's part of the history: causes are collected, and each sync becomes a record.

If the file cannot be written, the agent continues without it and tries again with the next record.
"""

import logging
import time
from collections.abc import Callable, Mapping
from itertools import islice

from ebpflb.entries.services import Flags, Frontend, ServiceEntry, frontend_kind, service_name
from ebpflb.errors import in_words, log_once
from ebpflb.history import records
from ebpflb.history.records import Change, ServiceChange, WriteCause
from ebpflb.model.addresses import Address, host_port
from ebpflb.model.cluster_state import Applied
from ebpflb.model.events import Changed, Drift, Kind, ObjectEvent, Removed, Replaced
from ebpflb.model.services import PortName
from ebpflb.options import Paths
from ebpflb.plan.service_entries import NO_ENTRIES, ServiceEntries
from ebpflb.version import VERSION

log = logging.getLogger(__name__)

# Named in one record, so that a line has at most some megabytes; the others are counted.
MOST_CAUSES = 50
MOST_SERVICES = 1000
MOST_NAMED = 100  # endpoints or frontends of a sort
AGAIN = WriteCause("again", "what could not be written before")
AUDIT = WriteCause("audit", "what differed from the plan")
DEVICES = WriteCause("changed", "devices and addresses")
CANARY = WriteCause("tried", "the canary")

Before = Mapping[PortName, ServiceEntries]


class History:
    """The history; all of it is called by the agent's loop."""

    def __init__(
        self, paths: Paths, *, limit: int = records.LIMIT, clock: Callable[[], float] = time.time
    ) -> None:
        self._paths, self._limit, self._clock = paths, limit, clock
        self._causes: list[WriteCause] = []
        self._more = 0
        self._error = ""

    def start(self) -> None:
        records.forget_earlier_versions(self._paths)
        self._record([WriteCause("started", "", "agent", VERSION)])

    def event(self, event: ObjectEvent, applied: Applied) -> None:
        """Note an event, which may have changed the cluster state."""
        changed = bool(applied.services or applied.slices)
        if changed or event.kind in (Kind.NODE, Kind.SERVICE_CIDR):
            self.because(_cause(event))

    def because(self, cause: WriteCause) -> None:
        """Add a cause of the changes until the next ``commit``."""
        if len(self._causes) < MOST_CAUSES:
            self._causes.append(cause)
        else:
            self._more += 1

    def explaining(self, report: Callable[[list[Drift]], None]) -> Callable[[list[Drift]], None]:
        """Return a function that records each correction by the audit, and passes it on."""

        def explained(drifts: list[Drift]) -> None:
            self._record([AUDIT])
            report(drifts)

        return explained

    def commit(self, before: Before, now: Before, *, keep: bool = False) -> None:
        """Record a turn of the loop: service ports that were written, and all in the maps now.

        ``keep``: the causes belong to a sync that is still to come.
        """
        compared = (_change(name, old, now.get(name, NO_ENTRIES)) for name, old in before.items())
        changes = [each for each in islice(compared, MOST_SERVICES) if each]
        if changes:
            self._record(self._causes or [AGAIN], changes, max(len(before) - MOST_SERVICES, 0))
        if not keep:
            self._causes, self._more = [], 0

    def _record(
        self, causes: list[WriteCause], services: list[ServiceChange] | None = None, more: int = 0
    ) -> None:
        time = records.moment(self._clock())
        change = Change(time, causes, self._more, services or [], more)
        try:
            records.append(self._paths, change, self._limit)
            self._error = ""
        except OSError as error:
            line = "history: %s: nothing is recorded until it can be"
            self._error = log_once(log.warning, line, in_words(error), self._error)


def _cause(event: ObjectEvent) -> WriteCause:
    match event:
        case Replaced():
            return WriteCause("listed", event.kind, f"{len(event.objects)} of them", event.version)
        case Changed():
            return WriteCause(event.event, event.kind, str(event.key), event.version)
        case Removed():
            return WriteCause("deleted", event.kind, str(event.key), event.version)


def _change(name: PortName, old: ServiceEntries, new: ServiceEntries) -> ServiceChange | None:
    """Return the change; None if a client could not notice it."""
    had, has = _differing(old, new), _differing(new, old)
    was, now = old.services, new.services
    lists = (
        (_place(at) for at in has if at not in had),
        (_place(at) for at in had if at not in has),
        (f"{_place(at)} ({_lists(has[at])})" for at in has if had.get(at, has[at]) != has[at]),
        (_frontend(at, now[at]) for at in now if at not in was),
        (_frontend(at, was[at]) for at in was if at not in now),
        (_frontend(at, now[at]) for at in now if _seen(was.get(at, now[at])) != _seen(now[at])),
    )
    named = [list(islice(each, MOST_NAMED)) for each in lists]
    if not any(named):
        return None
    counts = len(old.backends), len(new.backends)
    return ServiceChange(service_name(name, 0), *counts, *named)


def _differing(entries: ServiceEntries, other: ServiceEntries) -> dict[tuple[Address, int], Flags]:
    """Return the endpoints whose id or flags the other entries do not have, with what is shown.

    Of 100,000 one may have changed, so the others are only looked up.
    """
    known = dict(zip(other.ids, other.backends, strict=True))
    shown, pairs = entries.used_lists | {"here"}, zip(entries.ids, entries.backends, strict=True)
    return {
        each.endpoint: each.flags & shown
        for id, each in pairs
        if (it := known.get(id)) is None or it.flags != each.flags
    }


def _seen(entry: ServiceEntry) -> tuple[Flags, int]:
    return entry.flags, entry.affinity_seconds


def _place(endpoint: tuple[Address, int]) -> str:
    return host_port(*endpoint)


def _frontend(at: Frontend, entry: ServiceEntry) -> str:
    return f"{frontend_kind(at, entry.flags)} {at}"


def _lists(flags: Flags) -> str:
    return " ".join(sorted(flags & {"cluster", "local"})) or "draining"
