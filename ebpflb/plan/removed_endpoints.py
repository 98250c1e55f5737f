# SPDX-License-Identifier: Apache-2.0
"""Which endpoints of Services with on-removal: reset were removed or terminate, and since when.

A removal is due when the grace of its Service has passed. It is forgotten if the endpoint comes
back, or if the Service changes to keep its connections. A deleted Service loses all its endpoints,
and its last settings still apply to them. A terminating endpoint counts as removed from some time
before it is killed, unless it still gets new connections because no other endpoint is ready. Times
are in seconds of a monotonic clock.
"""

import math
from collections import Counter, UserDict
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from ebpflb.entries.services import Frontend
from ebpflb.model.addresses import Address
from ebpflb.model.annotations import LONGEST
from ebpflb.model.services import PortName

# The service ports whose connections are reset, and how an agent saves them for the next agent.

Endpoint = tuple[Address, int]


class Watched(NamedTuple):
    """A service port whose connections are reset ``grace`` seconds after their endpoint's removal.

    ``endpoints`` are those that its slices list now. Connections to those of them that are
    ``terminating`` are reset ``after_terminating`` seconds after that began, except to those that
    are ``usable`` for new connections.
    """

    grace: float
    frontends: frozenset[Frontend]
    endpoints: frozenset[Endpoint] = frozenset()
    after_terminating: float = 0.0
    terminating: frozenset[Endpoint] = frozenset()
    usable: frozenset[Endpoint] = frozenset()

    def due(self, endpoint: Endpoint, since: float) -> float:
        """When connections are to be reset to an endpoint removed, or terminating, since then."""
        if endpoint not in self.endpoints:
            return since + self.grace
        return math.inf if endpoint in self.usable else since + self.after_terminating


class WatchedPort(Struct, frozen=True):
    """A Watched to save; without endpoints, because the next agent reads them from the slices."""

    name: PortName
    grace: Annotated[float, Meta(ge=0, le=LONGEST)]
    frontends: tuple[tuple[str, Annotated[int, Meta(ge=0, lt=1 << 16)]], ...]  # address and port

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid address, as another agent's status may contain."""
        for address, _ in self.frontends:
            ip_address(address)


class WatchedPorts(UserDict[PortName, Watched]):
    """The watched service ports by name; a change costs the same however many are watched.

    A change of endpoints alone does not change ``saved``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ports: dict[PortName, WatchedPort] = {}
        self._saved: tuple[WatchedPort, ...] | None = ()

    def __setitem__(self, name: PortName, watched: Watched) -> None:
        former = self.data.get(name)
        super().__setitem__(name, watched)
        if former is None or former[:2] != watched[:2]:
            self._ports[name] = _port(name, watched)
            self._saved = None

    def __delitem__(self, name: PortName) -> None:
        super().__delitem__(name)
        del self._ports[name]
        self._saved = None

    @property
    def saved(self) -> tuple[WatchedPort, ...]:
        """The value for ``restore_watched``; the same object as long as it does not change."""
        if self._saved is None:
            self._saved = tuple(self._ports.values())
        return self._saved


def restore_watched(ports: Iterable[WatchedPort]) -> dict[PortName, Watched]:
    """The inverse of ``saved``."""
    return {each.name: Watched(each.grace, _frontends(each)) for each in ports}


def _port(name: PortName, watched: Watched) -> WatchedPort:
    frontends = sorted((str(each.address), each.port) for each in watched.frontends)
    return WatchedPort(name, watched.grace, tuple(frontends))


def _frontends(port: WatchedPort) -> frozenset[Frontend]:
    return frozenset(
        Frontend(ip_address(address), number, port.name.protocol)
        for address, number in port.frontends
    )


class Gone(NamedTuple):
    """A removed endpoint: connections to it through these frontends are to be reset.

    ``since``: when it was removed, or began terminating; an endpoint that comes back and is removed
    again counts separately.
    """

    service: PortName
    endpoint: Endpoint
    frontends: frozenset[Frontend]
    since: float
    terminating: bool = False


class Deleted(NamedTuple):
    """The change of a service port that was deleted."""


DELETED = Deleted()
Change = Watched | Deleted | None  # None: its connections are kept


MOST_REMOVED = 10_000  # removed endpoints of one namespace whose grace has not passed


class _Times(dict[PortName, dict[Endpoint, float]]):
    """Service port -> its removed endpoints -> when each was removed. No entry is empty.

    Of one namespace there are at most MOST_REMOVED: no tenant fills the memory by endpoints that
    come and go.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts = Counter[str]()  # by namespace

    def add(self, name: PortName, times: Mapping[Endpoint, float]) -> None:
        """Set when these endpoints were removed; those beyond the limit are not noted."""
        known, counts = self.setdefault(name, {}), self._counts
        for endpoint, at in times.items():
            if endpoint in known or counts[name.namespace] < MOST_REMOVED:
                counts[name.namespace] += endpoint not in known
                known[endpoint] = at
        if not known:
            del self[name]

    def remove(self, name: PortName, endpoints: Iterable[Endpoint]) -> None:
        times = self.get(name, {})
        gone = [endpoint for endpoint in endpoints if times.pop(endpoint, None) is not None]
        self._counts[name.namespace] -= len(gone)
        if gone and not times:
            del self[name]

    def forget(self, name: PortName) -> None:
        self._counts[name.namespace] -= len(self.pop(name, ()))


class RemovedEndpoints:
    """Keeps which endpoints were removed, and when each removal is due.

    ``watched`` are the service ports, including deleted ones with a pending removal. ``former`` are
    those that an earlier agent watched; a former one that ``update`` does not name before
    ``loaded`` is called has been deleted.
    """

    def __init__(self, former: Mapping[PortName, Watched]) -> None:
        self.watched = WatchedPorts()
        self.deleted: set[PortName] = set()
        self._former = dict(former)
        self._since = _Times()
        self._due_once = _Times()  # removals that were due, of endpoints that have not come back

    def update(self, name: PortName, change: Change, now: float) -> bool:
        """Apply a change; return whether connections to endpoints removed before may exist."""
        former = self._former.pop(name, None)
        before = self.watched.get(name)
        if isinstance(change, Deleted):
            return self._delete(name, before or former, now, is_former=former is not None)
        self.deleted.discard(name)
        if change is None:
            self._forget(name)
            self._due_once.forget(name)
            return False
        self.watched[name] = change
        for times in (self._since, self._due_once):
            times.remove(name, change.endpoints - change.terminating)
        earlier = before or Watched(change.grace, frozenset())
        begun = change.terminating - earlier.terminating
        self._since.add(name, dict.fromkeys(begun | (earlier.endpoints - change.endpoints), now))
        return before is None

    def knows(self, name: PortName) -> bool:
        """Whether the service port is watched, or was watched by an earlier agent."""
        return name in self.watched or name in self._former

    def loaded(self, now: float) -> bool:
        """Delete the former service ports not named yet: all existing ones have been.

        Returns as ``update``.
        """
        found = [self.update(name, DELETED, now) for name in [*self._former]]
        return any(found)

    def found(self, name: PortName, endpoint: Endpoint, now: float) -> None:
        """Note a connection to an endpoint.

        An endpoint that is not listed counts as removed now.
        """
        watched = self.watched.get(name)
        is_known = endpoint in self._since.get(name, {})
        if watched and endpoint not in watched.endpoints and not is_known:
            self._since.add(name, {endpoint: now})

    def due(self) -> float:
        """When the next removal is due; infinity means none is pending."""
        pending = (
            self.watched[name].due(endpoint, since)
            for name, times in self._since.items()
            for endpoint, since in times.items()
        )
        return min(pending, default=math.inf)

    def take_due(self, now: float) -> list[Gone]:
        """Return the removals whose grace has passed; each is returned once."""
        gone = list[Gone]()
        for name, times in [*self._since.items()]:
            watched = self.watched[name]
            due = {at: since for at, since in times.items() if watched.due(at, since) <= now}
            gone += [
                Gone(name, at, watched.frontends, since, at in watched.terminating)
                for at, since in due.items()
            ]
            if due:
                self._due_once.add(name, due)
            self._since.remove(name, due)
            self._forget_deleted(name)
        return gone

    def is_gone(self, gone: Gone) -> bool:
        """Whether a due removal still holds.

        It does not if the endpoint was listed again since then, even briefly, or if its Service now
        keeps connections.
        """
        return self._due_once.get(gone.service, {}).get(gone.endpoint) == gone.since

    def done(self, gone: Iterable[Gone]) -> None:
        """Forget removals that the caller no longer needs for ``is_gone``."""
        for each in filter(self.is_gone, gone):
            self._due_once.remove(each.service, [each.endpoint])

    def forget_deleted(self) -> None:
        """Forget the deleted service ports without a pending removal."""
        for name in [*self.deleted]:
            self._forget_deleted(name)

    def by_frontend(self) -> Iterator[tuple[Frontend, PortName]]:
        """Yield the frontends of all watched service ports."""
        for name, watched in self.watched.items():
            for frontend in watched.frontends:
                yield frontend, name

    def _delete(
        self, name: PortName, before: Watched | None, now: float, *, is_former: bool
    ) -> bool:
        if before is None:
            return False
        self.watched[name] = Watched(before.grace, before.frontends)
        self.deleted.add(name)
        self._since.add(name, dict.fromkeys(before.endpoints, now))
        if not is_former:
            self._forget_deleted(name)
        return is_former

    def _forget_deleted(self, name: PortName) -> None:
        if name in self.deleted and name not in self._since:
            self._forget(name)

    def _forget(self, name: PortName) -> None:
        self.watched.pop(name, None)
        self.deleted.discard(name)
        self._since.forget(name)
