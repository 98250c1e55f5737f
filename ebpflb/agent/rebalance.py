# SPDX-License-Identifier: Apache-2.0
"""Rebalance: idle connections of sockets move to endpoints that came later (ebpflb.io/rebalance).

After a change of a Service that wants it a thread asks the loop for the Service's endpoints. When
there is a new one, it looks each second at the sockets of endpoints that hold more than their
share, and ends a few of those that are between two requests (bpf/sockets/quiet.h): their owners
connect again. How many: plan/rebalance.py. Nothing moves while the objects' source cannot be read,
and a port's connections stop moving when a new one of them does not open. Otherwise the thread
sleeps.
"""

import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import accumulate, islice
from typing import Any, NamedTuple

from ebpflb.agent.loop import Inbox, Part, Turn
from ebpflb.errors import EbpflbError, in_words
from ebpflb.kernel.quiet_sockets import ENDED, READY, ClientSocket, QuietSockets
from ebpflb.model import annotations
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Key
from ebpflb.model.services import PortName
from ebpflb.plan.desired import DesiredBackend
from ebpflb.plan.rebalance import LONGEST, Movement, excess
from ebpflb.plan.service_entries import ServiceEntries
from ebpflb.plan.stale import Endpoint
from ebpflb.workers import PeriodicWorker

log = logging.getLogger(__name__)

MOST_PORTS = 4096  # of Services that move at a time; others begin when these are done
MOST_WATCHED = 8192  # sockets of this node; as many as the map has entries
MOST_A_TURN = 10  # ends of this node, about a second
_SHORTEST, _LONGEST = 0.5, 1.5  # seconds between two turns: nodes do not act in step
_BUSY = 20  # times a turn's processor time to the next one
RETRY_SECONDS = 60.0


def in_turn(ports: Mapping[Key, int], most: int) -> list[Key]:
    """Return Services with at most ``most`` ports together: of each namespace one port, then the
    next one, and so on. ``ports``: how many each has.
    """
    count = Counter[str]()

    def rank(key: Key) -> int:
        count[key.namespace] += ports[key]
        return count[key.namespace]

    order = sorted(ports, key=rank)
    totals = accumulate(map(ports.__getitem__, order))
    return [key for key, total in zip(order, totals, strict=True) if total <= most]


class _Port(NamedTuple):
    """A service port whose connections may move; ``flag``: of the backends that sockets get."""

    rebalance: annotations.Rebalance
    id: int
    flag: str
    ids: tuple[int, ...]
    backends: Sequence[DesiredBackend]

    @property
    def weights(self) -> dict[int, int]:
        """The weights of the backends that new connections of sockets get, by id."""
        pairs = zip(self.ids, self.backends, strict=True)
        return {id: each.weight for id, each in pairs if self.flag in each.flags and each.weight}

    @property
    def endpoints(self) -> dict[int, Endpoint]:
        """The endpoints of all backends, by id: an id may have been another Service's before."""
        return {id: each.endpoint for id, each in zip(self.ids, self.backends, strict=True)}


class Rebalancer(PeriodicWorker, Part):
    """``moved`` counts the ended connections; ``lacking``: why none can be ended, if so.

    ``actual`` returns what is written of service ports, and ``source_errors`` why their source
    cannot be read; the loop calls both. ``clock`` is a monotonic clock, in seconds.
    """

    name = "rebalance"

    def __init__(
        self,
        quiet: QuietSockets,
        cluster: ClusterState,
        inbox: Inbox,
        actual: Callable[[], Mapping[PortName, ServiceEntries]],
        source_errors: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(self.name, _LONGEST, failing="connections do not move")
        self._quiet, self._cluster, self._inbox = quiet, cluster, inbox
        self._actual, self._source_errors, self._clock = actual, source_errors, clock
        self._changed: dict[Key, float] = {}  # when a Service last changed; of the loop
        self._former: Set[Key] = set()  # Services that were there when the agent started
        self._has_served = False
        self.movements: dict[PortName, Movement] = {}
        self._ended: set[int] = set()  # cookies of sockets that their owners have not closed yet
        self._rests_until = -math.inf
        self.moved = 0
        self.lacking: str | None = None

    # In the agent's loop

    def observe(self, turn: Turn) -> None:
        """Note the Services that have changed, or whose slices have; wake the thread for them."""
        for _, applied in turn.applied:
            slices = applied.slices.values()
            of_slices = {it.service for each in slices if (it := each.after or each.before)}
            services = applied.services | of_slices
            if not self._has_served:
                self._former |= services
            if wanting := services & self._cluster.with_rebalance:
                self._changed |= dict.fromkeys(wanting, self._clock())
                self.want(True)
        self._has_served = self._has_served or turn.serves

    def status(self) -> Mapping[str, Any]:
        return {"not_rebalanced": self.lacking}

    # In the thread

    def stop(self) -> None:
        super().stop()
        self._quiet.close()

    def turn(self) -> None:
        """Raises EbpflbError or OSError; then nothing is done for a while."""
        begun = time.thread_time()
        self.want(False)  # a Service that changes meanwhile wakes this again
        try:
            if self._clock() >= self._rests_until:
                self._look()
                self.lacking = self._quiet.out_of_reach
        except (EbpflbError, OSError) as error:
            self.lacking, self._rests_until = in_words(error), self._clock() + RETRY_SECONDS
            raise
        finally:
            self.want(self._cluster.with_rebalance and self._changed)
            used = _BUSY * (time.thread_time() - begun)
            self.interval = max(random.uniform(_SHORTEST, _LONGEST), used)

    def _look(self) -> None:
        if not self._cluster.with_rebalance:
            self.movements.clear()
            self._former = set()
            self._quiet.close()
            return
        gone = [it for it in self.movements if it.owner not in self._cluster.with_rebalance]
        for name in gone:
            del self.movements[name]
        self._quiet.load()
        with suppress(TimeoutError):  # a busy loop is asked again by the next turn
            ports, is_away = self._inbox.ask(self._ports)
            moving = {
                name: port
                for name, port in ports.items()
                if self._movement(name).look(port.weights.keys(), self._clock())
            }
            opening = self._opening({name: port.id for name, port in moving.items()})
            self._move({name: moving[name] for name in opening if not is_away})

    def _movement(self, name: PortName) -> Movement:
        if name not in self.movements:
            self.movements[name] = Movement(is_new=name.owner not in self._former)
        return self.movements[name]

    def _ports(self) -> tuple[dict[PortName, _Port], bool]:
        """Return the ports, and whether their source cannot be read; called by the loop."""
        actual, found = self._actual(), dict[PortName, _Port]()
        wanting, since = self._cluster.with_rebalance, self._clock() - LONGEST
        self._changed = {it: at for it, at in self._changed.items() if it in wanting and at > since}
        services = {key: self._cluster.services.get(key, ()) for key in self._changed}
        for key in in_turn({key: len(its) for key, its in services.items()}, MOST_PORTS):
            for port in services[key]:
                its = actual.get(port.name)
                if port.rebalance and its and port.node_local is None:
                    flag = "local" if port.internal_local else "cluster"
                    found[port.name] = _Port(port.rebalance, its.id, flag, its.ids, its.backends)
        return found, bool(self._source_errors()) or not self._cluster.complete

    def _opening(self, moving: Mapping[PortName, int]) -> list[PortName]:
        """Return the ports, of these with their ids, whose new connections have all opened."""
        failures = self._quiet.count_failures(moving.values())
        for name, id in moving.items():
            if failures[id]:
                self._movement(name).stop()
                log.warning("%s: connections stay: a new one could not be opened", name)
        return [name for name, id in moving.items() if not failures[id]]

    def _move(self, moving: Mapping[PortName, _Port]) -> None:
        """Watch the sockets of endpoints that have too many, and end some that may end."""
        endpoints = {id: at for port in moving.values() for id, at in port.endpoints.items()}
        sockets = [*self._quiet.of(endpoints)] if moving else []
        self._ended &= {each.cookie for each in sockets}
        open_ = [each for each in sockets if each.cookie not in self._ended]
        counts = Counter(each.backend for each in open_)
        beyond = {
            name: excess(counts, port.weights, port.rebalance.above)
            for name, port in moving.items()
        }
        idle = {id: moving[name].rebalance.idle for name, its in beyond.items() for id in its}
        watched = {
            each.cookie: each
            for each in islice((it for it in open_ if it.backend in idle), MOST_WATCHED)
        }
        self._quiet.watch({cookie: idle[it.backend] for cookie, it in watched.items()})
        if watched:
            self._end(watched, beyond, counts)

    def _end(
        self,
        watched: Mapping[int, ClientSocket],
        beyond: Mapping[PortName, Mapping[int, int]],
        counts: Mapping[int, int],
    ) -> None:
        self._quiet.look({each.netns for each in watched.values()})
        states = self._quiet.states()
        ready = [watched[it] for it, known in states.items() if known.state == READY]
        chosen = {it.cookie: states[it.cookie] for it in self._choose(ready, beyond, counts)}
        self._quiet.want_ended(chosen, wanted=True)
        self._quiet.look({watched[cookie].netns for cookie in chosen})
        after = self._quiet.states()
        ended = {cookie for cookie in chosen if after[cookie].state == ENDED}
        kept = {cookie: after[cookie] for cookie in chosen.keys() - ended}
        self._quiet.want_ended(kept, wanted=False)
        self._quiet.forget(ended)
        self._ended |= ended
        self.moved += len(ended)
        backends = Counter(watched[cookie].backend for cookie in ended)
        for name, its in beyond.items():
            if count := sum(backends[id] for id in its):
                self.movements[name].ended(count)
                log.info("%s: %d idle connections ended: other endpoints have fewer", name, count)

    def _choose(
        self,
        ready: list[ClientSocket],
        beyond: Mapping[PortName, Mapping[int, int]],
        counts: Mapping[int, int],
    ) -> Iterable[ClientSocket]:
        """Return sockets that are ready: of each endpoint no more than it has too many."""
        random.shuffle(ready)
        chosen: list[ClientSocket] = []
        for name, its in beyond.items():
            most, left = self.movements[name].most(its, counts), dict(its)
            for each in ready:
                if left.get(each.backend) and most:
                    most, left[each.backend] = most - 1, left[each.backend] - 1
                    chosen.append(each)
        return random.sample(chosen, min(len(chosen), MOST_A_TURN))
