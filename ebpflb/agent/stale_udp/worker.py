# SPDX-License-Identifier: Apache-2.0
"""When to search for stale UDP sockets: after which changes, in which passes."""

import logging
import math
import time
from bisect import insort
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import reduce
from operator import attrgetter, or_
from typing import NamedTuple

from ebpflb.agent.stale_udp.conntrack_worker import (
    FIRST_RETRY,
    LONGEST_RETRY,
    MovedFlowsWorker,
    OnSearch,
    StaleConnectionsWorker,
)
from ebpflb.agent.stale_udp.lookups import Maps
from ebpflb.agent.stale_udp.socket_search import (
    RENEWAL,
    Counts,
    EachNamespace,
    EndSocket,
    SocketEnder,
    stale_sockets,
)
from ebpflb.errors import EbpflbError, in_words
from ebpflb.kernel.maps.records import Peer, PeerFrontend
from ebpflb.kernel.node import sock_diag
from ebpflb.model.addresses import Family
from ebpflb.model.services import Protocol
from ebpflb.plan.service_entries import BackendChange
from ebpflb.workers import DueWorker

# Which backends a write has removed from UDP service ports, and what serves instead.


class RemovedBackends(NamedTuple):
    """The ids of backends that were removed from UDP service ports.

    ``replaced``: other backends serve the port now. ``orphaned``: no backend does, and sockets keep
    the removed one until another comes. ``served_again``: a port has a backend that had none
    before. ``moved``: a frontend has moved to another service port, with other backends.
    """

    replaced: frozenset[int] = frozenset()
    orphaned: frozenset[int] = frozenset()
    served_again: bool = False
    moved: bool = False

    def __bool__(self) -> bool:
        return any(self)

    def __or__(self, other: "RemovedBackends") -> "RemovedBackends":
        replaced, orphaned = self.replaced | other.replaced, self.orphaned | other.orphaned
        served_again, moved = self.served_again or other.served_again, self.moved or other.moved
        return RemovedBackends(replaced, orphaned, served_again, moved)


def removed_backends(changes: Iterable[BackendChange]) -> RemovedBackends:
    """Return the backends that these changes of service ports removed."""
    replaced, orphaned, served_again = set[int](), set[int](), False
    for name, former_ids, new_ids, _ in changes:
        if name.protocol == Protocol.UDP:
            removed = set(former_ids).difference(new_ids)
            (replaced if new_ids else orphaned).update(removed)
            served_again |= bool(new_ids) and not former_ids
    return RemovedBackends(frozenset(replaced), frozenset(orphaned), served_again)


# A pending search, and how several are joined.


class SearchKind(Enum):
    """The first three follow a change; RENEWAL keeps rebound flows from being swept."""

    FIRST = auto()
    SECOND = auto()
    EVERYTHING = auto()
    RENEWAL = auto()


class StaleSearch(NamedTuple):
    """When to search, and for what; ``everything``: regardless of the counters of backends."""

    due: float
    kind: SearchKind
    removed: RemovedBackends
    everything: bool

    def __or__(self, later: "StaleSearch") -> "StaleSearch":
        """Join both, at the time of the later one."""
        everything = self.everything or later.everything
        return later._replace(removed=self.removed | later.removed, everything=everything)


log = logging.getLogger(__name__)

SECOND_PASS_DELAY = 1.0  # seconds: longer than a socket stays inside a hook
# Seconds until everything is searched, whatever the counters say. Two threads of a socket that
# replace its removed backend at once count it as closed twice (bpf/sockets/datagram.h); then
# another open socket of that backend is not seen in the counters.
EVERYTHING_DELAY = 60.0
_PAUSE_FACTOR = 4  # a search of many namespaces takes CPU, and changes may follow fast


class StaleUdpWorker(DueWorker):
    """Search in a thread from ``start`` to ``stop``; conntrack is left to two other threads.

    ``each_namespace`` calls a function in every network namespace (node.namespaces), ``end_socket``
    runs the program bpf/hooks/socket_end.c. After a search
    the thread calls ``on_search`` for each family, with the seconds that it took and the number of
    ended sockets or rebound flows. ``can_end`` says, after ``start``, whether this kernel ends
    sockets. ``shadow``: a kube-proxy on this node translates, so that sockets without a translation
    by a hook belong to it. ``clock`` is a monotonic clock, in seconds. ``error``: why the last
    search failed, if so; it is repeated with the next one, or after a growing pause.
    """

    def __init__(
        self,
        maps: Maps,
        each_namespace: EachNamespace,
        end_socket: EndSocket,
        on_search: OnSearch = lambda *_: None,
        *,
        shadow: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("stale-udp", clock)
        self.maps, self.on_search, self.shadow = maps, on_search, shadow
        self.ender = SocketEnder(maps, each_namespace, end_socket, can_end=True)
        self.searches: list[StaleSearch] = []
        self.connections = StaleConnectionsWorker(maps, on_search, shadow=shadow, clock=clock)
        self.moved = MovedFlowsWorker(maps, on_search, clock)
        self._error: str | None = None
        self.pause = FIRST_RETRY
        self._orphans = True  # there may be sockets whose frontend no backend serves
        self.not_found: set[tuple[Peer, PeerFrontend]] = set()  # no connected socket in two passes
        self._earliest = 0.0  # when the next search may begin

    @property
    def can_end(self) -> bool:
        return self.ender.can_end

    @property
    def error(self) -> str | None:
        return self.connections.error or self._error

    def start(self) -> None:
        self.ender.can_end = sock_diag.can_destroy()
        if not self.can_end:
            rebound = "those of pods are moved to another backend, the node's own are not"
            effect = (
                rebound
                if sock_diag.can_list()
                else "they keep their removed backend (modprobe udp_diag)"
            )
            log.warning(
                "this kernel cannot destroy sockets: of UDP sockets connected to a "
                "removed backend, %s",
                effect,
            )
        self.moved.start()
        self.connections.start()
        super().start()

    def stop(self) -> None:
        """Stop; return when no thread works any more."""
        self.moved.stop()
        self.connections.stop()
        super().stop()

    def check(self, changes: Iterable[BackendChange], *, frontends_moved: bool = False) -> None:
        """Search for sockets and flows that these changes made stale; returns at once.

        To be called after the changes were written to the maps. ``frontends_moved``: UDP frontends
        have moved to other service ports too.
        """
        changed = [change for change in changes if change.name.protocol == Protocol.UDP]
        self.connections.check(changed)
        if changed or frontends_moved:
            due = max(self._clock(), self._earliest)
            removed = removed_backends(changed)._replace(moved=frontends_moved)
            self._schedule(StaleSearch(due, SearchKind.FIRST, removed, everything=False))

    def check_connections(self) -> None:
        """Delete entries that conntrack got while nothing translated; returns at once."""
        self.connections.check_untranslated()

    def check_everything(self) -> None:
        """Search for sockets that became stale while no agent ran; returns at once."""
        self.connections.check_everything()
        removed = RemovedBackends(served_again=True)
        self._schedule(StaleSearch(self._clock(), SearchKind.FIRST, removed, everything=True))

    def _schedule(self, search: StaleSearch) -> None:
        with self.changed:
            insort(self.searches, search, key=attrgetter("due"))
            self.changed.notify()

    @property
    def due(self) -> float:
        """When ``turn`` is due, by the clock; infinity means not before the next change."""
        return self.searches[0].due if self.searches else math.inf

    def turn(self) -> None:
        """Make the due searches of one kind, joined."""
        begun = self._clock()
        with self.changed:
            search = self._take_due(self.searches[0].kind, begun)
        try:
            self.search_and_report(search, begun)
        except (EbpflbError, OSError) as error:
            self._fail(search, in_words(error))
        except Exception as error:
            self._fail(search, f"{type(error).__name__}: {in_words(error)}")
            raise
        else:
            self._earliest = self._clock() + _PAUSE_FACTOR * (self._clock() - begun)
            self._error, self.pause = None, FIRST_RETRY
            self._schedule_after(search)

    def _fail(self, search: StaleSearch, reason: str) -> None:
        """Repeat both passes; searches that become due meanwhile join them."""
        if reason != self._error:
            log.warning(
                "stale UDP sockets cannot be ended: %s; trying again in %g s", reason, self.pause
            )
        self._error, self._earliest = reason, self._clock() + FIRST_RETRY
        kind = SearchKind.RENEWAL if search.kind is SearchKind.RENEWAL else SearchKind.FIRST
        self._schedule(search._replace(due=self._clock() + self.pause, kind=kind))
        self.pause = min(2 * self.pause, LONGEST_RETRY)

    def _take_due(self, kind: SearchKind, now: float) -> StaleSearch:
        """Return the due searches, joined with failed ones that wait for their repetition."""
        joins_all = self._error is not None and kind is SearchKind.FIRST
        taken = [s for s in self.searches if s.kind is kind and (s.due <= now or joins_all)]
        self.searches = [s for s in self.searches if s not in taken]
        return reduce(or_, taken)

    def _schedule_after(self, search: StaleSearch) -> None:
        if search.kind is SearchKind.FIRST:
            due = search.due + SECOND_PASS_DELAY
            self._schedule(search._replace(due=due, kind=SearchKind.SECOND))
            self._search_everything_in(EVERYTHING_DELAY, SearchKind.EVERYTHING)
        if self.ender.rebinder.backends:
            self._search_everything_in(RENEWAL, SearchKind.RENEWAL)

    def _search_everything_in(self, seconds: float, kind: SearchKind) -> None:
        """Schedule a search of this kind, unless one is pending."""
        if not any(pending.kind is kind for pending in self.searches):
            due = self._clock() + seconds
            self._schedule(StaleSearch(due, kind, RemovedBackends(), everything=True))

    def search_and_report(self, search: StaleSearch, begun: float) -> None:
        """Search once. Raises KernelError or OSError."""
        ended = Counts()
        if not self.shadow and search.kind is not SearchKind.RENEWAL:
            ended += self.ender.end_untranslated()
        if self._may_find(search):
            ended += self._end_stale(search.kind)
        if ended:
            how = "ended" if self.can_end else "moved to another backend"
            log.info("connected UDP sockets %s, their backend was removed: %d", how, ended.total())
        self._report(search, ended, self._clock() - begun)

    def _may_find(self, search: StaleSearch) -> bool:
        """Whether stale sockets are possible at all."""
        removed = search.removed
        self._orphans |= any(map(self._may_have_sockets, removed.orphaned))
        return (
            search.everything
            or removed.moved
            or (removed.served_again and self._orphans)
            or any(map(self._may_have_sockets, removed.replaced))
        )

    def _may_have_sockets(self, backend: int) -> bool:
        opened, closed = self.maps["backend_stats"].get(backend)
        return opened != closed or backend in self.ender.rebinder.backends

    def _end_stale(self, kind: SearchKind) -> Counts:
        """End stale sockets.

        Entries without a connected socket in two passes are not searched again.
        """
        stale, self._orphans = stale_sockets(self.maps)
        entries = set(stale.items())
        ended, not_found = self.ender.end(dict(entries - self.not_found))
        self.not_found &= entries
        if kind not in (SearchKind.FIRST, SearchKind.EVERYTHING):
            self.not_found |= not_found.items()
        log.debug("no connected socket was found for %d stale entries", len(not_found))
        return ended

    def _report(self, search: StaleSearch, ended: Counts, seconds: float) -> None:
        for family in Family if search.kind is SearchKind.FIRST else ended:
            self.on_search(family, seconds, ended[family])
