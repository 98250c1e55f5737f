# SPDX-License-Identifier: Apache-2.0
"""When to search for stale UDP sockets: after which changes, in which passes."""

import logging
import math
import time
from collections.abc import Callable, Iterable
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

log = logging.getLogger(__name__)

SECOND_PASS_DELAY = 1.0  # seconds: longer than a socket stays inside a hook
# Seconds until everything is searched, whatever the counters say. Two threads of a socket that
# replace its removed backend at once count it as closed twice (bpf/sockets/datagram.h); then
# another open socket of that backend is not seen in the counters.
EVERYTHING_DELAY = 60.0
_PAUSE_FACTOR = 4  # times the processor time of a search: changes may follow fast


class StaleSearch(NamedTuple):
    """When to search, and for sockets of which backends; further searches follow the first one.

    ``of_udp``: also for sockets that are connected to a frontend itself. ``everything``: for all
    stale sockets of UDP, regardless of the counters of backends.
    """

    due: float
    backends: frozenset[int]
    is_first: bool = True
    of_udp: bool = True
    everything: bool = False


class StaleUdpWorker(DueWorker):
    """Search in a thread from ``start`` to ``stop``; conntrack is left to two other threads.

    ``each_namespace`` calls a function in network namespaces (node.namespaces), ``end_socket``
    runs the program bpf/hooks/socket_end.c. After a search the thread calls ``on_search`` for each
    family, with the seconds that it took and the number of ended sockets. ``can_end`` says, after
    ``start``, whether this kernel ends sockets; otherwise none are searched for. ``shadow``: a
    kube-proxy on this node translates, so that sockets without a translation by a hook belong to
    it. ``clock`` is a monotonic clock, in seconds, and ``cpu_clock`` the thread's processor time: a
    pause does not grow when other threads delay this one. ``error``: why the last search failed, if
    so; it is repeated with the next one, or after a growing pause.
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
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        super().__init__("stale-udp", clock)
        self.maps, self.on_search, self.shadow = maps, on_search, shadow
        self._cpu_clock = cpu_clock
        self.ender = SocketEnder(maps, each_namespace, end_socket)
        self.can_end = self._ends_tcp = True
        self.searches: list[StaleSearch] = []
        self.connections = StaleConnectionsWorker(
            maps, on_search, shadow=shadow, clock=clock, cpu_clock=cpu_clock
        )
        self.moved = MovedFlowsWorker(maps, on_search, clock)
        self._error: str | None = None
        self.pause = FIRST_RETRY
        # Stale entries without a connected socket: since which pass, and those of two passes.
        self._missing: dict[tuple[Peer, PeerFrontend], float] = {}
        self.given_up: set[tuple[Peer, PeerFrontend]] = set()
        self._earliest = 0.0  # when the next search may begin

    @property
    def error(self) -> str | None:
        return self.connections.error or self._error

    def start(self) -> None:
        self.can_end, self._ends_tcp = sock_diag.can_destroy(), sock_diag.can_destroy_tcp()
        if not self.can_end:
            log.warning(
                "this kernel cannot list and destroy UDP sockets (CONFIG_INET_DIAG_DESTROY, "
                "modprobe udp_diag): connected sockets keep a removed endpoint until their clients "
                "connect again"
            )
        self.moved.start()
        self.connections.start()
        super().start()

    def stop(self) -> None:
        """Stop; return when no thread works any more."""
        self.moved.stop()
        self.connections.stop()
        super().stop()

    def check(self, changes: Iterable[BackendChange]) -> None:
        """Search for sockets and flows that these changes made stale; returns at once.

        To be called after the changes were written to the maps.
        """
        changes = tuple(changes)
        self.connections.check(changes)
        of_udp = [each for each in changes if each.name.protocol == Protocol.UDP]
        ended = [each for each in changes if each.name.protocol == Protocol.TCP and self._ends_tcp]
        backends = frozenset[int]().union(*(each.ids for each in (*of_udp, *ended)))
        if of_udp or backends:
            self._search_now(StaleSearch(self._soon, backends, of_udp=bool(of_udp)))

    def check_connections(self) -> None:
        """Delete entries that conntrack got while nothing translated; returns at once."""
        self.connections.check_untranslated()

    def check_everything(self) -> None:
        """Search for sockets that became stale while no agent ran; returns at once."""
        self.connections.check_everything()
        self._search_now(StaleSearch(self._soon, frozenset(), everything=True))

    def _search_now(self, search: StaleSearch) -> None:
        if self.can_end:
            with self.changed:
                self.searches.append(search)
                self.changed.notify()

    @property
    def _soon(self) -> float:
        return max(self._clock(), self._earliest)

    @property
    def due(self) -> float:
        """When ``turn`` is due, by the clock; infinity means not before the next change."""
        return min((search.due for search in self.searches), default=math.inf)

    def turn(self) -> None:
        """Make the due searches as one."""
        begun, cpu_begun = self._clock(), self._cpu_clock()
        with self.changed:
            search = self._take_due(begun)
        try:
            self.search_and_report(search, begun)
        except (EbpflbError, OSError) as error:
            self._fail(search, in_words(error))
        except Exception as error:
            self._fail(search, f"{type(error).__name__}: {in_words(error)}")
            raise
        else:
            self._earliest = self._clock() + _PAUSE_FACTOR * (self._cpu_clock() - cpu_begun)
            self._error, self.pause = None, FIRST_RETRY
            self._schedule_after(search, begun)

    def _fail(self, search: StaleSearch, reason: str) -> None:
        """Repeat the search, and those that follow it."""
        if reason != self._error:
            log.warning(
                "stale UDP sockets cannot be ended: %s; trying again in %g s", reason, self.pause
            )
        self._error, self._earliest = reason, self._clock() + FIRST_RETRY
        with self.changed:
            self.searches.append(search._replace(due=self._clock() + self.pause, is_first=True))
        self.pause = min(2 * self.pause, LONGEST_RETRY)

    def _take_due(self, now: float) -> StaleSearch:
        """Return the due searches, joined with failed ones that wait for their repetition."""
        taken = [each for each in self.searches if each.due <= now or self._error]
        self.searches = [each for each in self.searches if each not in taken]
        return StaleSearch(
            now,
            frozenset[int]().union(*(each.backends for each in taken)),
            is_first=any(each.is_first for each in taken),
            of_udp=any(each.of_udp for each in taken),
            everything=any(each.everything for each in taken),
        )

    def _schedule_after(self, search: StaleSearch, begun: float) -> None:
        if search.is_first:
            second = search._replace(due=begun + SECOND_PASS_DELAY, is_first=False)
            last = second._replace(due=begun + EVERYTHING_DELAY, everything=True)
            with self.changed:
                has_one = not search.of_udp or any(each.everything for each in self.searches)
                self.searches += [second] if has_one else [second, last]

    def search_and_report(self, search: StaleSearch, begun: float) -> None:
        """Search once. Raises KernelError or OSError."""
        ended = Counts()
        if search.of_udp and not self.shadow:
            ended += self.ender.end_untranslated()
        if search.everything or any(map(self._may_have_sockets, search.backends)):
            ended += self._end_stale(search, begun)
        if ended:
            log.info("connected sockets ended, their backend was removed: %d", ended.total())
        seconds = self._clock() - begun
        for family in Family if search.is_first and search.of_udp else ended:
            self.on_search(family, seconds, ended[family])

    def _may_have_sockets(self, backend: int) -> bool:
        opened, closed = self.maps["backend_stats"].get(backend)
        return bool(opened != closed)

    def _end_stale(self, search: StaleSearch, begun: float) -> Counts:
        """End stale sockets.

        Entries that had no connected socket in two passes are not searched again.
        """
        stale = set(stale_sockets(self.maps, search.backends).items())
        ended, missing = self.ender.end(dict(stale - self.given_up))
        since = {each: self._missing.get(each, begun) for each in missing.items()}
        second = {each for each in since if begun - since[each] >= SECOND_PASS_DELAY}
        self._missing, self.given_up = since, (self.given_up & stale) | second
        log.debug("no connected socket was found for %d stale entries", len(missing))
        return ended
