# SPDX-License-Identifier: Apache-2.0
"""When stale UDP entries of conntrack are deleted: at once after a change, and shortly after."""

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ebpflb.due_worker import DueWorker
from ebpflb.errors import EbpflbError, in_words
from ebpflb.model.addresses import Family, family
from ebpflb.plan.connections import StaleCandidates
from ebpflb.plan.service_entries import BackendChange
from ebpflb.stale_udp.conntrack_entries import StaleConnections
from ebpflb.stale_udp.end import Counts
from ebpflb.stale_udp.lookups import Maps

log = logging.getLogger(__name__)

# Seconds after a change. A packet may have been given a removed backend just before the change, and
# make its entry just after the first search. The last search is for a CPU that stood still.
PASS_TIMES = (0.0, 0.05, 1.0)
MOST_SEARCHES = 16  # together they take the kernel as long as it takes to read all entries of UDP
FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0  # seconds, after a search that has failed: 1, 2, 4, ...

OnSearch = Callable[[Family, float, int], None]


class _Search(NamedTuple):
    """``number`` is an index of PASS_TIMES."""

    due: float
    number: int


_Wanted = dict[StaleCandidates | None, _Search]  # None: all entries


class StaleConnectionsWorker(DueWorker):
    """Deletes in a thread from ``start`` to ``stop``, which does nothing else.

    Each turn is one search, those that follow a change at once come first, and what is reported
    twice before its turn is searched for once. The thread calls ``on_search`` after a search for
    each family: with the seconds that the search took, and how many entries were deleted.
    ``shadow``: the entries are those of a kube-proxy beside, and left alone. ``clock``: a monotonic
    one, in seconds. ``error``: why the last search has failed, if so; it is made again after the
    next change, or after a pause that grows.
    """

    def __init__(
        self,
        maps: Maps,
        on_search: OnSearch = lambda *_: None,
        *,
        shadow: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("stale-conntrack", clock)
        self.on_search, self.shadow = on_search, shadow
        self.error: str | None = None
        self._connections = StaleConnections(maps)
        self._waiting: _Wanted = {}
        self._pause = FIRST_RETRY

    def check(self, changes: Iterable[BackendChange]) -> None:
        """Delete what these changes made stale; returns at once.

        To be called when the changes have been written to the maps.
        """
        first = _Search(self._clock(), 0)
        self._schedule({each: first for change in changes for each in change.candidates})

    def check_everything(self) -> None:
        """Delete what became stale while no agent ran; returns at once."""
        self._schedule({None: _Search(self._clock(), 0)})

    @property
    def due(self) -> float:
        """When ``turn`` has something to do, by the clock; infinity: not before the next change."""
        return min((search.due for search in self._waiting.values()), default=math.inf)

    def turn(self) -> None:
        """Make one search."""
        begun = self._clock()
        with self._changed:
            taken = self._take(begun)
        try:
            deleted = self._delete(taken)
        except (EbpflbError, OSError) as error:
            self._fail(taken, in_words(error))
        except Exception as error:
            log.exception("deleting stale UDP flows from conntrack failed")
            self._fail(taken, f"{type(error).__name__}: {in_words(error)}")
        else:
            self._report(taken, deleted, self._clock() - begun)
            self._succeed(taken)

    def _take(self, now: float) -> _Wanted:
        """One of those that are due, or all if they are many: one search is enough for all."""
        due = {each: search for each, search in self._waiting.items() if search.due <= now}
        if len(due) <= MOST_SEARCHES:
            first = min(due, key=lambda each: (due[each].number, _cost(each)))
            due = {first: due[first]}
        for each in due:
            del self._waiting[each]
        return due

    def _delete(self, taken: _Wanted) -> Counts:
        (first, *others) = taken
        if first is None or others:
            return self._connections.delete_all()
        return self._connections.delete(first)

    def _report(self, taken: _Wanted, deleted: Counts, seconds: float) -> None:
        if deleted.total():
            log.info("%d UDP flows deleted from conntrack: no backend answers", deleted.total())
        searched = {family(each.frontend.address) for each in taken if each}
        is_first = any(search.number == 0 for search in taken.values())
        for each in (Family if None in taken else searched) if is_first else deleted:
            self.on_search(each, seconds, deleted[each])

    def _succeed(self, taken: _Wanted) -> None:
        """The next passes follow, and what has failed before does not wait any longer."""
        now = self._clock()
        following = {
            each: _Search(now + PASS_TIMES[number + 1] - PASS_TIMES[number], number + 1)
            for each, (_, number) in taken.items()
            if number + 1 < len(PASS_TIMES)
        }
        with self._changed:
            if self.error:
                self._waiting = {
                    each: search._replace(due=min(search.due, now))
                    for each, search in self._waiting.items()
                }
            self.error, self._pause = None, FIRST_RETRY
            self._waiting = following | self._waiting

    def _fail(self, taken: _Wanted, reason: str) -> None:
        """All passes are made again."""
        if reason != self.error:
            log.warning("stale UDP flows stay in conntrack: %s; trying again", reason)
        self.error = reason
        again = _Search(self._clock() + self._pause, 0)
        with self._changed:
            self._waiting = dict.fromkeys(taken, again) | self._waiting
        self._pause = min(2 * self._pause, LONGEST_RETRY)

    def _schedule(self, wanted: _Wanted) -> None:
        if wanted and not self.shadow:
            with self._changed:
                self._waiting |= wanted
                self._changed.notify()


def _cost(candidates: StaleCandidates | None) -> int:
    """What takes longer comes later: IPv6 is listed, and all entries are the most."""
    if candidates is None:
        return 2
    return int(candidates.frontend.address.version == 6)
