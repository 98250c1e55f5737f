# SPDX-License-Identifier: Apache-2.0
"""When stale connections end (plan/stale.py: which ones, kernel/stale.py: how).

After each sync the agent passes on what the plans removed, and the Services with on-removal: reset.
One thread searches conntrack, and one the sockets, once at once and once more a second later: a
packet or a socket may have been inside a hook during the first search, given the removed endpoint
but not yet written down. When the grace of an endpoint has passed they search again. A search that
fails is repeated after a growing pause.

Another thread deletes the entries of UDP flows that send after their endpoint was removed: the
program at ingress reports a flow that it remembers when it gives the flow another backend
(bpf/engine/netfilter/choose.h), and the entry is deleted within a millisecond, however many
conntrack has.
"""

import logging
import math
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from enum import IntEnum
from itertools import islice
from typing import Any, ClassVar, NamedTuple

from ebpflb.entries.flows import Tuple
from ebpflb.errors import EbpflbError, in_words, log_once
from ebpflb.kernel.maps.readers import Ring
from ebpflb.kernel.node import sock_diag
from ebpflb.kernel.stale import (
    EachNamespace,
    Ended,
    EndSocket,
    Maps,
    ServedFrontends,
    SocketEnder,
    delete_entries,
    delete_flows,
)
from ebpflb.model.addresses import Family, family
from ebpflb.model.annotations import BY_CONNTRACK, BY_SOCKETS
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.stale import Change, Removal, Resets, Stale
from ebpflb.workers import DescriptorWorker, DueWorker

log = logging.getLogger(__name__)

# Seconds after a change. The second search is for a CPU that was stopped.
PASS_TIMES = (0.0, 1.0)
# Seconds between searches: three times the processor time of the last one, at least _PAUSE. So
# whoever removes endpoints all the time takes a quarter of a processor. A search for everything is
# rare, and takes 4 s among a million entries: after it no other one waits longer than _AFTER_ALL.
_PAUSE, _PAUSE_FACTOR, _AFTER_ALL = 0.1, 3, 1.0
FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0  # seconds, after a failed search: 1, 2, 4, ...
_NONE: Mapping[PortName, Change] = {}

OnSearch = Callable[[Family, float, int], None]


OnReset = Callable[[str, int], None]  # a kind of connections, and how many were reset


class Scope(IntEnum):
    """What to search: what was removed, all frontends, or connections without translation."""

    REMOVED = 0
    EVERYTHING = 1
    UNTRANSLATED = 2


class Search(NamedTuple):
    """``number`` is an index of PASS_TIMES; ``are_open``: for open connections to reset, too."""

    due: float
    protocols: frozenset[Protocol]
    removals: tuple[Removal, ...] = ()
    scope: Scope = Scope.REMOVED
    are_open: bool = False
    number: int = 0


class StaleWorker:
    """Search in threads from ``start`` to ``stop``, and end what is stale.

    ``each_namespace`` calls a function in network namespaces (node.namespaces), ``end_socket`` runs
    the program bpf/hooks/socket_end.c. The threads call ``on_search`` after a search for UDP, for
    each family, with the seconds that it took and the number of ended sockets or deleted entries;
    and ``on_reset``. ``shadow``: a kube-proxy on this node translates, and everything is left to
    it, except sockets that a hook has translated. ``clock`` is a monotonic clock, in seconds, and
    ``cpu_clock`` a thread's processor time.
    """

    def __init__(
        self,
        maps: Maps,
        each_namespace: EachNamespace,
        end_socket: EndSocket,
        on_search: OnSearch = lambda *_: None,
        on_reset: OnReset = lambda *_: None,
        *,
        shadow: bool = False,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        told = Told(on_search, on_reset)
        self.entries = EntriesWorker(maps, told, clock, cpu_clock, shadow=shadow)
        ender = SocketEnder(maps, each_namespace, end_socket)
        self.sockets = SocketsWorker(ender, maps, told, clock, cpu_clock, shadow=shadow)
        self.searching: tuple[SearchWorker, ...] = self.entries, self.sockets
        self._threads = *self.searching, MovedFlowsWorker(maps, self.entries.pending, on_search)

    def start(self) -> None:
        for each in self._threads:
            each.start()

    def stop(self) -> None:
        """Stop; return when no thread works any more."""
        for each in reversed(self._threads):
            each.stop()

    @property
    def ends_udp(self) -> bool:
        """Whether this kernel ends UDP sockets, after ``start``."""
        return Protocol.UDP in self.sockets.can_end

    @property
    def error(self) -> str | None:
        """Why the last search failed, if so."""
        return self.entries.error or self.sockets.error

    def check(
        self, removals: Iterable[Removal], changes: Mapping[PortName, Change] = _NONE
    ) -> None:
        """End what these removals made stale, and what these changes reset; returns at once.

        To be called after they were written to the maps.
        """
        found = tuple(removals)
        for each in self.searching:
            each.check(found, changes)

    def check_untranslated(self) -> None:
        """Delete entries that conntrack got while nothing translated; returns at once."""
        self.entries.check_all(Scope.UNTRANSLATED, len(PASS_TIMES) - 1)

    def check_everything(self) -> None:
        """End what became stale while no agent ran; returns at once."""
        for each in self.searching:
            each.check_all(Scope.EVERYTHING, 0)


class Told(NamedTuple):
    """The receivers of a search's results."""

    on_search: OnSearch
    on_reset: OnReset


class SearchWorker(DueWorker):
    """Search for one kind of connections, and end the stale ones.

    Each kind has its own thread and pauses: a search for sockets in many namespaces keeps no entry
    of conntrack waiting, whose client's next segment would otherwise go to a removed endpoint.
    ``error``: why the last search failed, if so; it is repeated after the next change, or after a
    growing pause. A pause does not grow when other threads delay this one.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        maps: Maps,
        told: Told,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
        *,
        shadow: bool,
    ) -> None:
        super().__init__(f"stale-{self.kind}", clock)
        self.maps, self.told, self.shadow, self._cpu_clock = maps, told, shadow, cpu_clock
        self.resets = Resets()
        self.searches: list[Search] = []
        self.error: str | None = None
        self.pause = FIRST_RETRY
        self._earliest = -math.inf  # when the next search may begin

    @abstractmethod
    def _end(self, stale: Stale, taken: list[Search], protocols: frozenset[Protocol]) -> Ended:
        """End the stale connections of these protocols, open ones too if a search is for them."""

    def check(self, removals: tuple[Removal, ...], changes: Mapping[PortName, Change]) -> None:
        """As StaleWorker.check."""
        now, protocols = self._clock(), {each.protocol for each in removals}
        with self.changed:
            are_open = True in {self.resets.update(*each, now) for each in changes.items()}
            protocols |= {Protocol.TCP} if are_open else set()
            if protocols:
                due = now + PASS_TIMES[0]
                self._add(Search(due, frozenset(protocols), removals, are_open=are_open))
            self._wake(self._reset_due)

    def check_all(self, scope: Scope, number: int) -> None:
        """Search now, for more than what was removed."""
        protocols = frozenset({Protocol.UDP, Protocol.TCP})
        with self.changed:
            self._add(Search(self._clock(), protocols, scope=scope, number=number))

    def _add(self, search: Search) -> None:
        self.searches.append(search)
        self._wake(search.due)

    def _wake(self, due: float) -> None:
        """Notify the thread if it waits for longer: changes may follow fast."""
        if max(due, self._earliest) < self.until:
            self.changed.notify()

    @property
    def due(self) -> float:
        """When ``turn`` is due, by the clock; infinity means not before the next change."""
        due = min((search.due for search in self.searches), default=math.inf)
        return max(min(due, self._reset_due), self._earliest)

    @property
    def _reset_due(self) -> float:
        """When to search for open connections; after an error, the repeated search does it."""
        return math.inf if self.error else self.resets.due

    def turn(self) -> None:
        """Make the due searches of one scope together."""
        begun, cpu_begun = self._clock(), self._cpu_clock()
        with self.changed:
            taken = self._take(begun)
        try:
            self._search(taken, begun)
            with self.changed:
                self._succeed([*_following(taken, self._clock())])
        except (EbpflbError, OSError) as error:
            self._fail(taken, in_words(error))
        except Exception as error:
            self._fail(taken, f"{type(error).__name__}: {in_words(error)}")
            raise
        finally:
            pause = max(_PAUSE, _PAUSE_FACTOR * (self._cpu_clock() - cpu_begun))
            if taken[0].scope != Scope.REMOVED:
                pause = min(pause, _AFTER_ALL)
            self._earliest = max(self._earliest, self._clock() + pause)

    def _take(self, now: float) -> list[Search]:
        """Return the due searches of one scope, and failed ones that wait for their repetition.

        The one that has been due for longest has its turn, so that changes which follow fast keep
        none waiting.
        """
        if self._reset_due <= now:
            self.searches.append(Search(now, frozenset({Protocol.TCP}), are_open=True))
        due = [each for each in self.searches if each.due <= now or self.error]
        scope = min(due, key=lambda each: (each.due, each.scope)).scope
        taken, left = list[Search](), list[Search]()
        for each in self.searches:
            is_taken = each.scope == scope and (each.due <= now or self.error)
            (taken if is_taken else left).append(each)
        self.searches = left
        return taken

    def _search(self, taken: list[Search], begun: float) -> None:
        protocols, are_open = _protocols(taken), _are_open(taken)
        with self.changed:
            stale = self._stale(taken, self.resets if are_open else None)
        ended = self._end(stale, taken, protocols)
        is_udp = Protocol.UDP in protocols and any(each.number == 0 for each in taken)
        self._report(stale, begun, Family if is_udp else (), ended)
        if are_open:
            with self.changed:
                self.resets.searched(begun)

    def _stale(self, searches: Iterable[Search], resets: Resets | None = None) -> Stale:
        """Return what is stale by the maps, and by what these searches are for."""
        served = ServedFrontends(self.maps)
        return Stale(served.endpoints, served.keys, _removals(searches), resets, self._clock())

    def _report(self, stale: Stale, begun: float, searched: Iterable[Family], ended: Ended) -> None:
        of_udp, unanswered, seconds = Counter[Family](), 0, self._clock() - begun
        for (frontend, (address, port)), count in ended.items():
            if frontend.protocol == Protocol.UDP:
                of_udp[family(address)] += count
            elif name := stale.reset_by(frontend, (address, port)):
                line = "%s: %d %s to %s port %d reset: it is no longer an endpoint"
                log.info(line, name, count, self.kind, address, port)
                self.told.on_reset(self.kind, count)
            else:
                unanswered += count
        if of_udp:
            log.info("%d UDP %s ended: their endpoints do not serve", of_udp.total(), self.kind)
        if unanswered:
            line = "%d connections without an answer ended (%s): their endpoints do not serve"
            log.info(line, unanswered, self.kind)
        for each in {*searched, *of_udp}:
            self.told.on_search(each, seconds, of_udp[each])

    def _succeed(self, following: list[Search]) -> None:
        """Schedule these searches; clear the error and reset the pause."""
        self.searches += following
        self.error, self.pause = None, FIRST_RETRY

    def _fail(self, taken: list[Search], reason: str) -> None:
        """Schedule the searches, and those that follow them, again after a pause."""
        self._set_error(reason)
        now = self._clock()
        with self.changed:
            self.searches += [each._replace(due=now + self.pause, number=0) for each in taken]
        self._earliest = now + FIRST_RETRY
        self.pause = min(2 * self.pause, LONGEST_RETRY)

    def _set_error(self, reason: str) -> None:
        line = "connections to removed endpoints cannot be ended: %s; trying again"
        self.error = log_once(log.warning, line, reason, self.error)


class EntriesWorker(SearchWorker):
    """Deletes entries of conntrack."""

    kind = BY_CONNTRACK

    def pending(self) -> Stale:
        """Return what is stale by the searches that are still to come."""
        with self.changed:
            return self._stale(self.searches)

    def _end(self, stale: Stale, taken: list[Search], protocols: frozenset[Protocol]) -> Ended:
        if self.shadow:
            return Ended()
        is_partial = taken[0].scope == Scope.REMOVED
        return delete_entries(
            self.maps,
            stale,
            protocols,
            ports=stale.ports if is_partial else None,
            udp_endpoints=stale.udp_endpoints if is_partial else None,
            are_open=_are_open(taken),
            untranslated=taken[0].scope == Scope.UNTRANSLATED,
        )


class SocketsWorker(SearchWorker):
    """Ends sockets. ``can_end``, after ``start``: the protocols whose sockets this kernel ends."""

    kind = BY_SOCKETS

    def __init__(self, ender: SocketEnder, maps: Maps, *how: Any, shadow: bool) -> None:
        super().__init__(maps, *how, shadow=shadow)
        self.ender = ender
        self.can_end = frozenset({Protocol.UDP, Protocol.TCP})

    def start(self) -> None:
        self.can_end = frozenset(_ending_protocols())
        super().start()

    def _end(self, stale: Stale, taken: list[Search], protocols: frozenset[Protocol]) -> Ended:
        possible = self.can_end & protocols
        ends_udp = Protocol.UDP in possible and not self.shadow
        ended = self.ender.end_untranslated(stale) if ends_udp else Ended()
        wanted = possible if _are_open(taken) else possible & self._busy(taken)
        return ended + self.ender.end(stale, wanted) if wanted else ended

    def _busy(self, taken: list[Search]) -> set[Protocol]:
        """Return the protocols of removed backends with sockets: a search takes 40 ms of CPU.

        The second search ignores the counters of UDP: two threads of a socket that replace its
        removed backend at once count it as closed twice (bpf/sockets/datagram.h).
        """
        stats = self.maps["backend_stats"]
        ids = {(each.protocol, id) for each in _removals(taken) for id in each.ids}
        found = {protocol for protocol, id in ids if len({*stats.get(id)}) > 1}
        is_any = any(each.number or each.scope == Scope.EVERYTHING for each in taken)
        return found | {Protocol.UDP} if is_any else found


def _are_open(searches: Iterable[Search]) -> bool:
    """Whether one of them is for open connections, too."""
    return any(each.are_open for each in searches)


def _removals(searches: Iterable[Search]) -> list[Removal]:
    return [each for search in searches for each in search.removals]


def _protocols(searches: Iterable[Search]) -> frozenset[Protocol]:
    return frozenset[Protocol]().union(*(each.protocols for each in searches))


def _following(taken: Iterable[Search], now: float) -> Iterator[Search]:
    """Yield the one search that follows these, of one scope."""
    if first := [each for each in taken if each.number + 1 < len(PASS_TIMES)]:
        number, removals = first[0].number + 1, tuple(_removals(first))
        what = _protocols(first), removals, first[0].scope, _are_open(first)
        yield Search(now + PASS_TIMES[number], *what, number)


def _ending_protocols() -> Iterator[Protocol]:
    """Yield the protocols whose sockets this kernel ends; warns of the others."""
    for protocol, lost in (
        (Protocol.UDP, "connected UDP sockets keep a removed endpoint"),
        (Protocol.TCP, "on-removal: reset resets no sockets"),
    ):
        if sock_diag.can_destroy(protocol):
            yield protocol
        else:
            name = protocol.name
            text = "this kernel ends no %s sockets (CONFIG_INET_DIAG_DESTROY, modprobe %s_diag): %s"
            log.warning(text, name, name.lower(), lost)


# The flows that programs report.

MAP = "moved_flows"
MOST_FLOWS = 1024  # at once: 50 ms of CPU; a search of conntrack costs less than many more


class MovedFlowsWorker(DescriptorWorker):
    """Delete the entries of reported flows in a thread from ``start`` to ``stop``.

    Flows that no program reports, as those that send nothing, are left to the search; so is a flow
    whose report was lost, or whose entry could not be deleted.
    """

    def __init__(self, maps: Maps, stale: Callable[[], Stale], on_search: OnSearch) -> None:
        super().__init__("moved-udp-flows")
        self._map, self._stale, self.on_search = maps[MAP], stale, on_search
        self._error: str | None = None

    def run(self) -> None:
        with closing(Ring(self._map)) as ring:
            ring.take()  # reports to a former agent: everything is searched for at the start
            while not self.stopped.is_set():
                self.wait([ring], math.inf)
                self._delete(ring.take_values())

    def _delete(self, flows: list[Tuple]) -> None:
        begun, different = time.monotonic(), dict.fromkeys(flows)
        try:
            deleted = delete_flows(self._stale(), islice(different, MOST_FLOWS))
        except (EbpflbError, OSError) as error:
            line = "moved UDP flows stay in conntrack until the next search: %s"
            self._error = log_once(log.warning, line, in_words(error), self._error)
            return
        self._error = None
        counts = Counter(family(address) for _, (address, _) in deleted.elements())
        for each, count in counts.items():
            self.on_search(each, time.monotonic() - begun, count)
