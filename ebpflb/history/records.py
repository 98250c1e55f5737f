# SPDX-License-Identifier: Apache-2.0
"""The history's files: a line of JSON for each sync that changed a Service.

A file that is full replaces the one before it, so there are two. Nothing is synced to the disk: the
history survives the agent, not the machine.
"""

import errno
import glob
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from ebpflb import files
from ebpflb.entries.services import (
    Flags,
    Frontend,
    ServiceEntry,
    frontend_kind,
    service_name,
    service_of,
)
from ebpflb.errors import NodeError, in_words, log_once, one_line
from ebpflb.model.addresses import Address, host_port
from ebpflb.model.cluster_state import Applied
from ebpflb.model.events import Changed, Drift, Kind, ObjectEvent, Removed, Replaced
from ebpflb.model.services import PortName
from ebpflb.options import Paths
from ebpflb.plan.service_entries import NO_ENTRIES, ServiceEntries
from ebpflb.version import VERSION

LIMIT = 16 << 20  # bytes of both files together
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PRIVATE = 0o600

# Times as people type them: 10m (ago), 14:03, 2026-11-22T14:03:10.
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_TODAY = re.compile(r"\d\d?:\d\d(:\d\d(\.\d+)?)?")


class WriteCause(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event of the cluster or the node, with the object's kind, name and resourceVersion."""

    event: str  # "added", "modified", "deleted", "listed", or another reason for a write
    kind: str = ""
    name: str = ""
    version: str = ""  # "" if the source has none, as manifests


class ServiceChange(msgspec.Struct):
    """The change of one service port; endpoints as ADDRESS:PORT, frontends with their kind.

    Each list names at most MOST_NAMED; ``endpoints_before`` and ``endpoints_after`` count all.
    """

    service: str
    endpoints_before: int = 0
    endpoints_after: int = 0
    endpoints_added: list[str] = []
    endpoints_removed: list[str] = []
    endpoints_changed: list[str] = []  # with their current lists
    frontends_added: list[str] = []
    frontends_removed: list[str] = []
    frontends_changed: list[str] = []


class Change(msgspec.Struct):
    """One sync. ``more_causes`` and ``more_services`` are not named.

    ``time``: of this machine's zone, to the millisecond. ``services`` is empty for a start of the
    agent, and for a correction by the audit.
    """

    time: str
    causes: list[WriteCause]
    more_causes: int = 0
    services: list[ServiceChange] = []
    more_services: int = 0


class LatestChanges(NamedTuple):
    """The latest changes, and the number of earlier ones that match too."""

    begins: str
    changes: list[Change]
    earlier: int
    notes: list[str]


def moment(time: float) -> str:
    """Return a time of this machine's zone, to the millisecond."""
    return datetime.fromtimestamp(time).astimezone().isoformat(timespec="milliseconds")


def parse_time(text: str, now: float) -> float:
    """Return seconds since the epoch; a time without a zone is in this machine's zone.

    A time of day in the future means yesterday's. Raises ValueError with a sentence for the user.
    """
    try:
        return _parsed_time(text, now)
    except (ValueError, OverflowError):
        example = "14:03, 2026-11-22T14:03:10 or 10m"
        raise ValueError(f'"{text}" is not a time such as {example}') from None


def _parsed_time(text: str, now: float) -> float:
    """Parse a time. Raises ValueError or OverflowError."""
    if ago := _AGO.fullmatch(text):
        return now - float(ago[1]) * _UNITS[ago[2]]
    if _TODAY.fullmatch(text):
        day = datetime.fromtimestamp(now).date().isoformat()
        found = datetime.fromisoformat(f"{day}T{text.zfill(len(text) + (text[1] == ':'))}")
        at = found.timestamp()
        return at if at <= now else at - 86400
    return datetime.fromisoformat(text).timestamp()


def append(latest: Path, change: Change, limit: int = LIMIT) -> None:
    """Append a record to this file. Raises OSError; then the file is left unchanged."""
    line = msgspec.json.encode(change) + b"\n"
    fd = os.open(latest, _CREATE, _PRIVATE)
    try:
        size = os.lseek(fd, 0, os.SEEK_END)
        if size and size + len(line) > limit // 2:
            os.replace(latest, _former(latest))
            return append(latest, change, limit)
        if os.write(fd, line) < len(line):  # half a line would damage the next one
            os.ftruncate(fd, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(latest))
    finally:
        os.close(fd)


def forget_earlier_versions(paths: Paths) -> None:
    """Delete the files of agents up to 0.1, which recorded the content of the maps."""
    for path in paths.run.glob(f"{glob.escape(paths.name)}.[0-9]*.history"):
        path.unlink(missing_ok=True)


def latest_changes(
    paths: Paths, service: tuple[str, str] | None, since: float | None, limit: int
) -> LatestChanges:
    """Return the latest changes, at most ``limit`` (0: all), of a Service or of all.

    ``service``: namespace and name; the name "" means all Services of the namespace. Raises
    NodeError without a history.
    """
    found: deque[Change] = deque(maxlen=limit or None)
    notes: list[str] = []
    begins, matching = "", 0
    for change in _read(paths, notes):
        begins = begins or change.time
        if since and datetime.fromisoformat(change.time).timestamp() < since:
            continue
        if service:
            change.services = [it for it in change.services if _is_of(it, service)]
        if change.services or not service:
            found.append(change)
            matching += 1
    if not begins:
        raise NodeError(f"no history in {paths.run}: did an agent of this version run here?")
    return LatestChanges(begins, [*found], matching - len(found), notes)


def _is_of(change: ServiceChange, service: tuple[str, str]) -> bool:
    namespace, _, name = service_of(change.service).partition("/")
    return namespace == service[0] and service[1] in ("", name)


def _read(paths: Paths, notes: list[str]) -> Iterator[Change]:
    """Yield the records, oldest first; ``notes`` gets what could not be read."""
    for path in (_former(paths.history_file), paths.history_file):
        try:
            with files.open_regular(path, LIMIT, follow=False) as file:
                yield from _parsed(path, file, notes)
        except FileNotFoundError:
            pass
        except OSError as error:
            notes.append(f"not read: {path}: {error.strerror}")
        except files.UnusableFile as error:
            notes.append(f"not read: {path}: {error}")


def _parsed(path: Path, lines: Iterator[bytes], notes: list[str]) -> Iterator[Change]:
    for number, line in enumerate(lines, 1):
        try:
            change = msgspec.json.decode(line, type=Change)
            datetime.fromisoformat(change.time)
            yield change
        except (ValueError, RecursionError) as error:
            notes.append(f"not read: {path}: line {number} is damaged ({one_line(str(error))})")


def _former(latest: Path) -> Path:
    return latest.with_suffix(".history.1")


# The agent's part: causes are collected, and each sync becomes a record. If the file cannot be
# written, the agent continues without it and tries again with the next record.

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
        self, paths: Paths, *, limit: int = LIMIT, clock: Callable[[], float] = time.time
    ) -> None:
        self._paths, self._file = paths, paths.history_file
        self._limit, self._clock = limit, clock
        self._causes: list[WriteCause] = []
        self._more = 0
        self._error = ""

    def start(self) -> None:
        forget_earlier_versions(self._paths)
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
        time = moment(self._clock())
        change = Change(time, causes, self._more, services or [], more)
        try:
            append(self._file, change, self._limit)
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
