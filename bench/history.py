# SPDX-License-Identifier: Apache-2.0
"""A soak's history: every request, change of endpoints and fault; and the broken promises.

`make soak` writes a JSON line for each, with times of one monotonic clock in seconds. ``check``
compares them with the promises of docs/reliability.md.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

LATE = 30.0  # seconds within which a change must be applied, on a machine that is busy with tests


class Request(msgspec.Struct, frozen=True, tag="request"):
    """A request on a new connection: the name of the endpoint that answered, or an errno's name.

    ``sticky``: its Service has session affinity.
    """

    begun: float
    ended: float
    client: str
    service: str
    endpoint: str = ""
    error: str = ""
    sticky: bool = False


class Open(msgspec.Struct, frozen=True, tag="open"):
    """A connection that stays open was used; ``error``: why it failed."""

    begun: float
    ended: float
    client: str
    error: str = ""


class Endpoints(msgspec.Struct, frozen=True, tag="endpoints"):
    """A Service got other endpoints; versions count up, over all Services."""

    at: float
    service: str
    version: int
    names: frozenset[str]


class Applied(msgspec.Struct, frozen=True, tag="applied"):
    """The agent was seen to have applied this version, and all before it."""

    at: float
    version: int


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """A fault of the node.

    ``until``: when its effect had ended, at the latest. ``harms``: the Service whose requests may
    fail or move meanwhile; "": none may.
    """

    at: float
    until: float
    what: str
    harms: str = ""


Record = Request | Open | Endpoints | Applied | Fault


class Violation(NamedTuple):
    """A broken promise, with its time."""

    at: float
    client: str
    kind: str
    text: str


FAILED = "a request failed that no fault excuses"
ENDED = "an open connection ended"
FOREIGN = "an endpoint of another Service answered"
REMOVED = "a removed endpoint answered"
MOVED = "session affinity was broken"
NOT_IN_FORCE = "a change of endpoints was late"


class Versions:
    """The endpoints that a Service may have had at a time."""

    def __init__(self, records: Sequence[Record]) -> None:
        changes = [it for it in records if isinstance(it, Endpoints)]
        self.changes = sorted(changes, key=lambda it: it.version)
        applied = sorted(
            (it for it in records if isinstance(it, Applied)), key=lambda it: (it.at, it.version)
        )
        self._applied_at = [it.at for it in applied]
        self._applied = [it.version for it in applied]
        self._of: defaultdict[str, list[Endpoints]] = defaultdict(list)
        self.services: defaultdict[str, set[str]] = defaultdict(set)
        for change in self.changes:
            self._of[change.service].append(change)
            self.services[change.service] |= change.names

    def possible(self, service: str, begun: float, ended: float) -> list[frozenset[str]]:
        """Return the sets that may have been in force: the last one known to be applied at the
        beginning, and all that were written until the end.
        """
        changes = self._of[service]
        number = bisect_left(self._applied_at, begun)
        applied = self._applied[number - 1] if number else 0
        first = max(bisect_left(changes, applied + 1, key=lambda it: it.version) - 1, 0)
        end = bisect_left(changes, ended, key=lambda it: it.at)
        return [it.names for it in changes[first:end]]

    def seen(self, change: Endpoints, since: float) -> float | None:
        """Return when this version or a later one was first seen in force, from ``since`` on."""
        start = bisect_left(self._applied_at, since)
        for at, version in zip(self._applied_at[start:], self._applied[start:], strict=True):
            if version >= change.version:
                return at
        return None


def check(records: Sequence[Record]) -> list[Violation]:
    """Return the broken promises in the order of their times."""
    versions = Versions(records)
    faults = [it for it in records if isinstance(it, Fault)]
    requests = sorted(
        (it for it in records if isinstance(it, Request)), key=lambda it: (it.begun, it.ended)
    )
    found = [it for request in requests for it in _of_request(request, versions, faults)]
    found += _moved(requests, versions, faults)
    found += _late(versions, faults)
    found += [
        Violation(it.ended, it.client, ENDED, it.error)
        for it in records
        if isinstance(it, Open) and it.error
    ]
    return sorted(found)


def _of_request(
    request: Request, versions: Versions, faults: Iterable[Fault]
) -> Iterator[Violation]:
    service, endpoint = request.service, request.endpoint
    if request.error:
        if not _excused(faults, service, request.begun, request.ended):
            yield Violation(request.ended, request.client, FAILED, request.error)
    elif endpoint not in versions.services[service]:
        text = f"{endpoint} is no endpoint of {service}"
        yield Violation(request.ended, request.client, FOREIGN, text)
    elif not any(endpoint in it for it in versions.possible(service, request.begun, request.ended)):
        text = f"{endpoint} had been removed from {service} before the request"
        yield Violation(request.ended, request.client, REMOVED, text)


def _excused(faults: Iterable[Fault], service: str, begun: float, ended: float) -> bool:
    return any(it.harms == service and it.at <= ended and begun <= it.until for it in faults)


def _moved(
    requests: Iterable[Request], versions: Versions, faults: Sequence[Fault]
) -> Iterator[Violation]:
    """Check that a client with affinity keeps its endpoint while the Service has it."""
    last: dict[str, Request] = {}
    for request in requests:
        if not request.sticky or request.error:
            continue
        before = last.get(request.client)
        last[request.client] = request
        if before is None or before.endpoint == request.endpoint:
            continue
        meanwhile = request.service, before.begun, request.ended
        is_kept = all(before.endpoint in names for names in versions.possible(*meanwhile))
        if is_kept and not _excused(faults, *meanwhile):
            text = f"{before.endpoint}, then {request.endpoint}"
            yield Violation(request.ended, request.client, MOVED, text)


def _late(versions: Versions, faults: Sequence[Fault]) -> Iterator[Violation]:
    """Return the delay, without the time in which no agent ran."""
    for change in versions.changes:
        since = max([it.until for it in faults if it.at <= change.at <= it.until] + [change.at])
        seen = versions.seen(change, change.at)
        if seen is not None and seen > since + LATE:
            text = f"version {change.version} was in force {seen - since:.1f} s after it was due"
            yield Violation(seen, change.service, NOT_IN_FORCE, text)


_DECODER = msgspec.json.Decoder(Record)


def read(path: Path) -> list[Record]:
    """Read the records. Raises msgspec.ValidationError."""
    with path.open("rb") as lines:
        return [_DECODER.decode(line) for line in lines]


def write(path: Path, records: Iterable[Record]) -> None:
    """Append the records."""
    with path.open("ab") as out:
        out.writelines(msgspec.json.encode(it) + b"\n" for it in records)
