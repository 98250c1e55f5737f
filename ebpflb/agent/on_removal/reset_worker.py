# SPDX-License-Identifier: Apache-2.0
"""When connections are reset: after the grace of a removed endpoint, in several passes."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from ebpflb.agent.stale_udp.lookups import Maps, ServedFrontends, node_serves
from ebpflb.entries.services import Frontend
from ebpflb.errors import EbpflbError
from ebpflb.model.addresses import family
from ebpflb.model.services import PortName
from ebpflb.plan.desired import ANY, IN_LISTS
from ebpflb.plan.removed_endpoints import (
    Change,
    Endpoint,
    Gone,
    RemovedEndpoints,
    Watched,
    WatchedPort,
)
from ebpflb.workers import DueWorker

# The wanted connections: by the frontend that the client used, and the backend.

ResetCounts = Counter[tuple[Frontend, Endpoint]]


class FrontendNames:
    """The service ports that watch these frontends; a NodePort's address is unspecified.

    ``ports`` are the frontends' ports: connections to other ports need no closer look.
    """

    def __init__(self, maps: Maps, frontends: Iterable[tuple[Frontend, PortName]]) -> None:
        self._maps = maps
        self._names: dict[Frontend, list[PortName]] = defaultdict(list)
        for frontend, name in frontends:
            self._names[frontend].append(name)

    @property
    def ports(self) -> frozenset[int]:
        return frozenset(frontend.port for frontend in self._names)

    def has(self, frontend: Frontend, _endpoint: Endpoint) -> bool:
        """Whether the frontend is watched, for any backend."""
        return bool(self.of(frontend))

    def of(self, frontend: Frontend) -> list[PortName]:
        """Return the service ports that a client reaches at this address."""
        if frontend in self._names:
            return self._names[frontend]
        nodeport = frontend._replace(address=ANY[family(frontend.address)])
        if nodeport not in self._names or not node_serves(self._maps, frontend.address):
            return []
        is_another = self._maps["services"].get(frontend) is not None
        return [] if is_another else self._names[nodeport]


class GoneConnections:
    """Connections to removed endpoints.

    A connection does not count if another Service now has both the frontend and the endpoint, or if
    a terminating endpoint gets new connections by the frontend, because no other endpoint is ready.

    ``is_gone`` says whether a removal still holds: a search takes a while.
    """

    def __init__(self, maps: Maps, gone: Iterable[Gone], is_gone: Callable[[Gone], bool]) -> None:
        self._is_gone = is_gone
        self._gone = {(each.service, each.endpoint): each for each in gone}
        frontends = {each.service: each.frontends for each in self._gone.values()}
        pairs = [(frontend, name) for name, its in frontends.items() for frontend in its]
        self._names = FrontendNames(maps, pairs)
        self._served = ServedFrontends(maps)
        self._known: dict[tuple[Frontend, Endpoint], Gone | None] = {}

    @property
    def ports(self) -> frozenset[int]:
        return self._names.ports

    def has(self, frontend: Frontend, endpoint: Endpoint) -> bool:
        gone = self.of(frontend, endpoint)
        return gone is not None and self._is_gone(gone)

    def of(self, frontend: Frontend, endpoint: Endpoint) -> Gone | None:
        """Return the removed endpoint that a connection through this frontend leads to, or None."""
        at = frontend, endpoint
        if at not in self._known:
            self._known[at] = next(self._find(frontend, endpoint), None)
        return self._known[at]

    def _find(self, frontend: Frontend, endpoint: Endpoint) -> Iterator[Gone]:
        for name in self._names.of(frontend):
            gone = self._gone.get((name, endpoint))
            if gone and not self._is_served(frontend, gone):
                yield gone

    def _is_served(self, frontend: Frontend, gone: Gone) -> bool:
        _, backends = self._served.find(frontend) or (None, ())
        return any(
            (each.address, each.port) == gone.endpoint
            and (not gone.terminating or not IN_LISTS.isdisjoint(each.flags))
            for each in backends
        )


WantedConnections = FrontendNames | GoneConnections


class ConnectionKind(Protocol):
    """The connections of one kind, by ``kind``'s name."""

    kind: str

    def found(self, wanted: WantedConnections) -> Iterable[tuple[Frontend, Endpoint]]:
        """Return pairs of frontend and backend with connections; each pair once."""

    def reset(self, wanted: WantedConnections, *, is_last: bool) -> ResetCounts:
        """Reset the connections; return how many were reset for the first time.

        ``is_last``: this is the last pass.
        """


log = logging.getLogger(__name__)

PASSES = (0.0, 1.0, 3.0)  # seconds after the grace: a reset, or its request, may get lost
_PASS_RETRY_SECONDS = 5.0  # until a failed pass is tried again
_PAUSE_FACTOR = 4  # times the CPU time of a search: endpoints may be removed one after the other


class ConnectionsReset(NamedTuple):
    """A number of connections of one kind to a removed endpoint were reset."""

    service: PortName
    endpoint: Endpoint
    kind: str
    number: int


OnReset = Callable[[ConnectionsReset], None]


class _Pass(NamedTuple):
    due: float
    number: int  # an index of PASSES
    gone: tuple[Gone, ...]


class ResetWorker(DueWorker):
    """Search in a thread from ``start`` to ``stop``, and call ``on_reset`` from there.

    ``former`` are the service ports that an earlier agent watched. ``clock`` is a monotonic clock,
    in seconds, and ``cpu_clock`` the thread's processor time: a pause does not grow when other
    threads delay this one.
    """

    def __init__(
        self,
        maps: Maps,
        kinds: Sequence[ConnectionKind],
        former: Mapping[PortName, Watched],
        on_reset: OnReset = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        super().__init__("on-removal", clock)
        self._maps, self._kinds, self._on_reset = maps, kinds, on_reset
        self._cpu_clock = cpu_clock
        self.removed = RemovedEndpoints(former)
        self.passes: list[_Pass] = []
        self.searches = False  # whether to search for former endpoints
        self._earliest = 0.0  # when the next search may begin

    def update(self, changes: Mapping[PortName, Change], *, all_named: bool = False) -> None:
        """Take the Services' current settings; to be called after they were written.

        Returns at once.

        ``all_named``: every existing service port has been named since the start.
        """
        now = self._clock()
        with self.changed:
            mine = {
                name: change
                for name, change in changes.items()
                if isinstance(change, Watched) or self.removed.knows(name)
            }
            if not mine and not all_named:
                return
            for name, change in mine.items():
                self.searches |= self.removed.update(name, change, now)
            if all_named:
                self.searches |= self.removed.loaded(now)
            self.changed.notify()

    @property
    def watched_ports(self) -> tuple[WatchedPort, ...]:
        """The state for the next agent; the same object as long as nothing changes."""
        with self.changed:
            return self.removed.watched.saved

    @property
    def due(self) -> float:
        """When ``turn`` is due, by the clock; infinity means not before the next change."""
        if self.searches:
            return self._earliest
        return max(self._earliest, min([self.removed.due(), *(each.due for each in self.passes)]))

    def turn(self) -> None:
        """Do the due work; what failed is tried again."""
        begun, pause = self._cpu_clock(), _PASS_RETRY_SECONDS
        try:
            self.search_and_end()
            pause = _PAUSE_FACTOR * (self._cpu_clock() - begun)
        except (EbpflbError, OSError) as error:
            log.warning("connections to removed endpoints cannot be reset: %s", error)
        finally:
            self._earliest = self._clock() + pause

    def search_and_end(self) -> None:
        with self.changed:
            searches, self.searches = self.searches, False
        if searches:
            try:
                self._search()
            except Exception:
                self.searches = True
                raise
        now = self._clock()
        with self.changed:
            gone = tuple(self.removed.take_due(now))
            if gone:
                self.passes.append(_Pass(now, 0, gone))
            due = [each for each in self.passes if each.due <= now]
            self.passes = [each for each in self.passes if each.due > now]
        failed: list[Exception] = []
        for each in due:
            try:
                self._do(each)
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _search(self) -> None:
        """Search connections to endpoints that are not listed: their grace begins now."""
        with self.changed:
            names = FrontendNames(self._maps, list(self.removed.by_frontend()))
        found = {at for kind in self._kinds for at in kind.found(names)}
        now = self._clock()
        with self.changed:
            for frontend, endpoint in found:
                for name in names.of(frontend):
                    self.removed.found(name, endpoint, now)
            self.removed.forget_deleted()

    def _do(self, one: _Pass) -> None:
        """Make a pass; the next one follows.

        A failed pass is repeated, and does not stop others.
        """
        with self.changed:
            gone = tuple(each for each in one.gone if self.removed.is_gone(each))
        following, pause = one.number, _PASS_RETRY_SECONDS
        try:
            if gone:
                self._reset(gone, is_last=one.number + 1 == len(PASSES))
            following += 1
            pause = PASSES[following] - PASSES[one.number] if following < len(PASSES) else 0.0
        finally:
            with self.changed:
                if gone and following < len(PASSES):
                    self.passes.append(_Pass(self._clock() + pause, following, gone))
                elif gone:
                    self.removed.done(gone)

    def _is_gone(self, gone: Gone) -> bool:
        with self.changed:
            return self.removed.is_gone(gone)

    def _reset(self, gone: Iterable[Gone], *, is_last: bool) -> None:
        wanted = GoneConnections(self._maps, gone, self._is_gone)
        for kind in self._kinds:
            for (frontend, endpoint), count in kind.reset(wanted, is_last=is_last).items():
                found = wanted.of(frontend, endpoint)
                if found:
                    done = ConnectionsReset(found.service, endpoint, kind.kind, count)
                    self._report(done, terminating=found.terminating)

    def _report(self, done: ConnectionsReset, *, terminating: bool) -> None:
        address, port = done.endpoint
        text = "%s: %d %s to %s port %d reset: it %s"
        why = "is terminating" if terminating else "is no longer an endpoint"
        log.info(text, done.service, done.number, done.kind, address, port, why)
        self._on_reset(done)
