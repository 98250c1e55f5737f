# SPDX-License-Identifier: Apache-2.0
"""When stale UDP entries of conntrack are deleted: at once after a change, and shortly after."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from enum import Enum, auto
from itertools import chain, islice
from typing import NamedTuple

from ebpflb.agent.stale_udp.lookups import Maps, ServedFrontends, node_serves
from ebpflb.agent.stale_udp.socket_search import Counts
from ebpflb.entries.flows import (
    DESTINATION_NAT,
    SEEN_REPLY,
    Connection,
    Ends,
    Hook,
    StaleCandidates,
    Tuple,
    Unanswered,
)
from ebpflb.entries.services import Frontend
from ebpflb.errors import EbpflbError, KernelError, in_words, log_once
from ebpflb.kernel.maps.readers import FrontendKeys, Ring, StaleEndpoints
from ebpflb.kernel.netfilter import conntrack
from ebpflb.model.addresses import Address, Family, family
from ebpflb.model.services import Protocol
from ebpflb.plan.desired import ANY
from ebpflb.plan.service_entries import BackendChange
from ebpflb.workers import DescriptorWorker, DueWorker

# Stale UDP flows in conntrack: their entries are deleted (kube-proxy.md 11.1).
#
# An entry is stale if its original destination is a frontend and its reply comes from another
# address or port than those of the frontend's backends: from a removed backend, or from the
# frontend itself, if the entry was created when the frontend had no backends. At a frontend without
# backends, or that was removed, each translated entry is stale: its endpoint's address may be a
# stranger's by now. The client's next datagram opens a new flow. Entries of a kube-proxy that
# served before count too.
#
# Of TCP and SCTP an entry is deleted if it leads to a removed endpoint, or one that was set aside,
# which has not answered. A client that repeats its request would otherwise reach whoever gets the
# endpoint's address, and one that uses its port again within two minutes nobody.


log = logging.getLogger(__name__)


class StaleConnections:
    """The stale entries in the calling thread's network namespace."""

    def __init__(self, maps: Maps) -> None:
        self.maps = maps

    def delete(self, candidates: StaleCandidates) -> Counts:
        """Delete the stale ones among the candidates; return how many per family.

        The kernel searches its whole table. Raises NodeError.
        """
        frontend, backend = candidates
        serving = _Serving(self.maps, {frontend})
        backends = serving.at(frontend)
        if backends is None or backend in backends:
            return Counts()
        to = conntrack.tuple_to(frontend)
        count = conntrack.delete_answered(to, backend) if backend else None
        if count is not None:
            return Counts({family(frontend.address): count})
        answered_by = backend[0] if backend else None
        return self._delete(conntrack.connections_to(frontend, answered_by), serving)

    def delete_flows(self, flows: Iterable[Tuple]) -> Counts:
        """Delete the stale ones among the entries of these UDP flows; return how many per family.

        ``flows`` are requests as ingress sees them, or as egress does. The kernel finds each entry
        by a hash, however large its table is. Raises NodeError.
        """
        requests, answers = list[tuple[int, Ends]](), list[tuple[int, Ends]]()
        for flow in flows:
            ends = Ends(*flow[:4])
            if flow.hook == Hook.INGRESS:
                requests.append((flow.protocol, ends))
            else:
                answers.append((flow.protocol, ends.reversed()))
        entries = chain(conntrack.find(requests), conntrack.find(answers, conntrack.REPLY))
        return self._delete(entries, _Serving(self.maps))

    def delete_all(self, removed: Collection[Frontend] = ()) -> Counts:
        """Delete all stale entries, and TCP entries that were created while nothing translated.

        ``removed`` are frontends that were removed. Otherwise like ``delete``. All entries of UDP
        are read.
        """
        keys, ports = FrontendKeys(self.maps), {frontend.port for frontend in removed}
        self._delete_openings(keys)
        listed = conntrack.connections(
            lambda protocol, address, port: port in ports or keys(protocol, address, port),
            Protocol.UDP,
        )
        return self._delete(listed, _Serving(self.maps, removed))

    def delete_unanswered(self, wanted: Iterable[Unanswered]) -> None:
        """Delete the entries of these connections. Raises NodeError."""
        backends = defaultdict[Protocol, set[tuple[Address, int]]](set)
        for protocol, backend in wanted:
            backends[protocol].add(backend)
        for protocol, each in backends.items():
            if count := conntrack.delete_unanswered(protocol, each):
                log.info(
                    "%d %s connections that begin deleted from conntrack: their endpoints were "
                    "removed or set aside",
                    count,
                    protocol.name,
                )

    def delete_untranslated(self) -> Counts:
        """Delete the entries created while nothing translated; otherwise like ``delete``."""
        keys = FrontendKeys(self.maps)
        self._delete_openings(keys)
        listed = conntrack.connections(keys, Protocol.UDP, without=DESTINATION_NAT)
        return self._delete(listed, _Serving(self.maps))

    def _delete_openings(self, keys: FrontendKeys) -> None:
        """Delete the entries of untranslated TCP connections that have no answer yet.

        The client repeats its SYN, which is translated only without the entry. The SYN came before
        a device had programs, or while the nftables table was missing.
        """
        unanswered = SEEN_REPLY | DESTINATION_NAT
        conntrack.delete(conntrack.connections(keys, Protocol.TCP, without=unanswered))

    def _delete(self, listed: Iterable[Connection], serving: "_Serving") -> Counts:
        stale = [entry for entry in listed if serving.lacks_backend_of(entry)]
        conntrack.delete(stale)
        return Counts(family(entry.original.source) for entry in stale)


class _Serving:
    """The backends of each frontend, read from the maps only once.

    ``removed`` are frontends that may have been removed, and then have no backends.
    """

    def __init__(self, maps: Maps, removed: Collection[Frontend] = ()) -> None:
        self._maps, self._frontends, self._removed = maps, ServedFrontends(maps), removed
        self._known: dict[Frontend, set[tuple[Address, int]] | None] = {}

    def at(self, frontend: Frontend) -> set[tuple[Address, int]] | None:
        """Return the backends of a frontend.

        None: it is not a frontend, or its backends are changing, and then a search follows. What is
        passed through is answered by the frontend's address itself.
        """
        if frontend not in self._known:
            self._known[frontend] = self._find(frontend)
        return self._known[frontend]

    def _find(self, frontend: Frontend) -> set[tuple[Address, int]] | None:
        found = self._frontends.find(frontend)
        if found is None:
            return set() if self._was_removed(frontend) else None
        service, backends = found
        if any(each.service != service.id for each in backends):
            return None
        if not backends and "passthrough" in service.flags:
            return {(frontend.address, frontend.port)}
        return {(each.address, each.port) for each in backends}

    def _was_removed(self, frontend: Frontend) -> bool:
        nodeport = frontend._replace(address=ANY[family(frontend.address)])
        is_nodeport = nodeport in self._removed and node_serves(self._maps, frontend.address)
        return is_nodeport or frontend in self._removed

    def lacks_backend_of(self, entry: Connection) -> bool:
        """Whether none of the frontend's backends answers; without backends: whether any does."""
        _, destination, _, port = entry.original
        backends = self.at(Frontend(destination, port, Protocol.UDP))
        if not backends:
            return backends is not None and entry.is_translated
        return (entry.reply.source, entry.reply.source_port) not in backends


# Seconds after a change. Programs report the flows that send (MovedFlowsWorker), and a search would
# block the deletion of their entries. The last search is for a CPU that was stopped.
PASS_TIMES = (0.02, 1.0)
_PAUSE_FACTOR = 4  # times the processor time of a search for what TCP's endpoints did not answer
MOST_SEARCHES = 16  # this many take the kernel as long as reading all UDP entries
FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0  # seconds, after a failed search: 1, 2, 4, ...

OnSearch = Callable[[Family, float, int], None]


class _Search(NamedTuple):
    """``number`` is an index of PASS_TIMES."""

    due: float
    number: int


class Whole(Enum):
    """A search of the whole table: for all stale entries, or only for untranslated ones."""

    STALE = auto()
    UNTRANSLATED = auto()


_Wanted = StaleCandidates | Unanswered | Whole
_Searches = dict[_Wanted, _Search]


class StaleConnectionsWorker(DueWorker):
    """Delete stale entries in a thread from ``start`` to ``stop``.

    Each turn is one search; the first searches after changes have priority, and a change that is
    reported twice before its turn is searched for once. After a search the thread calls
    ``on_search`` for each family, with the seconds that the search took, and the number of deleted
    entries. ``shadow``: the entries belong to a kube-proxy on this node, and are left alone.
    ``clock`` is a monotonic clock, in seconds. ``error``: why the last search failed, if so; it is
    repeated after the next change, or after a growing pause.

    Programs report the datagrams that leave for a removed endpoint until its last search.
    """

    def __init__(
        self,
        maps: Maps,
        on_search: OnSearch = lambda *_: None,
        *,
        shadow: bool = False,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        super().__init__("stale-conntrack", clock)
        self._cpu_clock, self._rest_until = cpu_clock, 0.0
        self.on_search, self.shadow = on_search, shadow
        self.error: str | None = None
        self.entries = StaleConnections(maps)
        self.endpoints = StaleEndpoints(maps)
        self.waiting: _Searches = {}
        self.pause = FIRST_RETRY

    def check(self, changes: Iterable[BackendChange]) -> None:
        """Delete the entries that these changes made stale; returns at once.

        To be called after the changes were written to the maps.
        """
        first = _Search(self._clock() + PASS_TIMES[0], 0)
        found = set[_Wanted]()
        for change in changes:
            found |= change.candidates | change.unanswered
        self._schedule(dict.fromkeys(found, first))

    def check_everything(self) -> None:
        """Delete the entries that became stale while no agent ran; returns at once."""
        self._schedule({Whole.STALE: _Search(self._clock(), 0)})

    def check_untranslated(self) -> None:
        """Delete entries that conntrack got while nothing translated; returns at once."""
        self._schedule({Whole.UNTRANSLATED: _Search(self._clock(), 0)})

    @property
    def due(self) -> float:
        """When ``turn`` is due, by the clock; infinity means not before the next change."""
        return min(map(self._due_of, self.waiting), default=math.inf)

    def _due_of(self, wanted: _Wanted) -> float:
        """When to search: for what TCP's endpoints have not answered after a pause.

        Endpoints of TCP come and go fast, and a search of a million entries takes 0.6 s of CPU.
        """
        due = self.waiting[wanted].due
        return max(due, self._rest_until) if isinstance(wanted, Unanswered) else due

    def turn(self) -> None:
        """Make one search."""
        begun, cpu_begun = self._clock(), self._cpu_clock()
        with self.changed:
            taken = self._take(begun)
        try:
            deleted = self._delete(taken)
            self._report(taken, deleted, self._clock() - begun)
            self._succeed(taken)
        except (EbpflbError, OSError) as error:
            self._fail(taken, in_words(error))
        except Exception as error:
            self._fail(taken, f"{type(error).__name__}: {in_words(error)}")
            raise
        finally:
            if any(isinstance(each, Unanswered) for each in taken):
                used = self._cpu_clock() - cpu_begun
                self._rest_until = self._clock() + _PAUSE_FACTOR * used

    def _take(self, now: float) -> _Searches:
        """Return one due search, or all if there are many: then one of all entries is enough.

        So it always is for what has no answer.
        """
        due = {each: it for each, it in self.waiting.items() if self._due_of(each) <= now}
        if len(due) <= MOST_SEARCHES:
            first = min(due, key=lambda each: (due[each].number, _cost(each)))
            is_joined = isinstance(first, Unanswered)
            due = {
                each: search
                for each, search in due.items()
                if each is first or (is_joined and isinstance(each, Unanswered))
            }
        for each in due:
            del self.waiting[each]
        return due

    def _delete(self, taken: _Searches) -> Counts:
        self.entries.delete_unanswered(each for each in taken if isinstance(each, Unanswered))
        found = [each for each in taken if not isinstance(each, Unanswered)]
        if not found:
            return Counts()
        first, *others = found
        if first is Whole.STALE or others:
            return self.entries.delete_all({each.frontend for each in _candidates(found)})
        if first is Whole.UNTRANSLATED:
            return self.entries.delete_untranslated()
        return self.entries.delete(first)

    def _report(self, taken: _Searches, deleted: Counts, seconds: float) -> None:
        if deleted.total():
            log.info(
                "%d UDP flows deleted from conntrack: their backends are gone", deleted.total()
            )
        is_first = any(search.number == 0 for search in taken.values())
        for each in _families(taken) if is_first else deleted:
            self.on_search(each, seconds, deleted[each])

    def _succeed(self, taken: _Searches) -> None:
        """Schedule the next passes; searches that failed before wait no longer."""
        now = self._clock()
        following = {
            each: _Search(now + PASS_TIMES[number + 1], number + 1)
            for each, (_, number) in taken.items()
            if number + 1 < len(PASS_TIMES)
        }
        with self.changed:
            if self.error:
                self.waiting = {
                    each: search._replace(due=min(search.due, now))
                    for each, search in self.waiting.items()
                }
            self.endpoints.keep(_endpoints(following | self.waiting))
            self.error, self.pause = None, FIRST_RETRY
            self.waiting = following | self.waiting

    def _fail(self, taken: _Searches, reason: str) -> None:
        """Repeat all passes."""
        self._set_error(reason)
        again = _Search(self._clock() + self.pause, 0)
        with self.changed:
            self.waiting = dict.fromkeys(taken, again) | self.waiting
        self.pause = min(2 * self.pause, LONGEST_RETRY)

    def _schedule(self, wanted: _Searches) -> None:
        if wanted and not self.shadow:
            with self.changed:
                self.waiting |= wanted
                try:
                    self.endpoints.add(_endpoints(wanted))
                except KernelError as error:  # the searches find the flows, only later
                    self._set_error(in_words(error))
                self.changed.notify()

    def _set_error(self, reason: str) -> None:
        line = "stale UDP flows stay in conntrack: %s; trying again"
        self.error = log_once(log.warning, line, reason, self.error)


def _candidates(wanted: Iterable[_Wanted]) -> Iterator[StaleCandidates]:
    return (each for each in wanted if isinstance(each, StaleCandidates))


def _endpoints(wanted: _Searches) -> set[tuple[Address, int]]:
    return {each.backend for each in _candidates(wanted) if each.backend}


def _families(taken: _Searches) -> set[Family]:
    """Return the families that were searched."""
    whole = any(isinstance(each, Whole) for each in taken)
    return set(Family) if whole else {family(it.frontend.address) for it in _candidates(taken)}


def _cost(candidates: _Wanted) -> int:
    """Return the relative cost, since slower searches come later.

    IPv6 entries must be listed, and searches of the whole table take longest.
    """
    if isinstance(candidates, Whole):
        return 1 + candidates.value
    if isinstance(candidates, Unanswered):
        return int(candidates.backend[0].version == 6)
    return int(candidates.frontend.address.version == 6)


# The conntrack entries of UDP flows that programs report: deleted one by one.
#
# After a backend was removed conntrack still translates its flows' datagrams by their entries. A
# flow is reported with its first datagram then, and its entry is deleted within a millisecond,
# however many entries conntrack has. Two programs report:
#
# - ingress, when it gives a flow that it remembers another backend (bpf/engine/netfilter/choose.h)
# - egress, when a datagram leaves for the removed endpoint (bpf/path/stale_endpoint.h): also of a
#   flow that ingress does not remember; but the endpoint may be a process of this node itself, and
#   then no program sees the datagram leave
#
# Flows that neither reports, as those that send nothing, are left to the search; so is a flow whose
# report was lost, or whose entry could not be deleted.

MAP = "moved_flows"
MOST_FLOWS = 1024  # at once: 50 ms of CPU; a search of conntrack costs less than many more


class MovedFlowsWorker(DescriptorWorker):
    """Delete the entries in a thread from ``start`` to ``stop``.

    After a deletion the thread calls ``on_search`` for each family, with the seconds that it took,
    and the number of entries. ``clock`` is a monotonic clock, in seconds.
    """

    def __init__(
        self,
        maps: Maps,
        on_search: OnSearch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("moved-udp-flows")
        self.on_search, self._clock = on_search, clock
        self.entries = StaleConnections(maps)
        self._map = maps[MAP]
        self._error: str | None = None

    def run(self) -> None:
        with closing(Ring(self._map)) as ring:
            ring.take()  # reports to a former agent: everything is searched for at the start
            while not self.stopped.is_set():
                self.wait([ring], math.inf)
                self._delete(ring.take_values())

    def _delete(self, flows: list[Tuple]) -> None:
        begun, different = self._clock(), dict.fromkeys(flows)
        try:
            deleted = self.entries.delete_flows(islice(different, MOST_FLOWS))
        except (EbpflbError, OSError) as error:
            line = "moved UDP flows stay in conntrack until the next search: %s"
            self._error = log_once(log.warning, line, in_words(error), self._error)
            return
        self._error = None
        for each, count in deleted.items():
            self.on_search(each, self._clock() - begun, count)
