# SPDX-License-Identifier: Apache-2.0
"""Write the addresses of the pools into the status of Services (--l2-pool; model/pools.py).

One agent writes: the owner, by rendezvous hashing among the Nodes that are Ready. The others need
not know whether it lives: the next in the order writes what is still missing STAND_IN seconds
later, and so on; Nodes that load balancers may not use, which may have no agent, come last. Two may
write at once: each reads all Services before, and writes only to one that has not changed since; of
two Services that got one address the younger is then given another.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ebpflb.agent.loop import Inbox, Part, Turn
from ebpflb.cluster import balanced_services
from ebpflb.cluster.balanced_services import Ingress
from ebpflb.cluster.decoding import RequestRejected
from ebpflb.cluster.event_recorder import MakeServer, RateLimit, object_limit
from ebpflb.cluster.source import Backoff, Timing
from ebpflb.errors import EbpflbError, in_words, log_once
from ebpflb.kernel.node import routes
from ebpflb.model.addresses import Address, Network
from ebpflb.model.claims import WRITER, Claims
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import MAX_LISTED, Key
from ebpflb.model.facts import Fact
from ebpflb.model.pools import Allotted, Unusable, allot, is_pooled, ranked
from ebpflb.redaction import redact
from ebpflb.workers import PeriodicWorker

if TYPE_CHECKING:
    from ebpflb.cluster.api import Server

log = logging.getLogger(__name__)

LOOK_INTERVAL = 0.25  # seconds between two looks for Services that lack something
STAND_IN = 3.0  # seconds that each agent waits longer than the one before it
BURST, BURST_SECONDS = 5, 5.0  # lists at once, and seconds for one more, whatever tenants write
RECHECK = 300.0  # seconds: labels of namespaces change without a Service's change
_API = "the API server"  # the name of its error, among Services


class _Known(NamedTuple):
    """This agent's copy of the cluster, at one moment; ``own``: addresses of this node."""

    claims: Claims
    own: Mapping[Address, str]
    ranges: Mapping[Network, str]

    def unusable(self, services: Mapping[Address, str]) -> Unusable:
        """Return what no Service may get. Raises OSError."""
        routers = dict.fromkeys(routes.routers(), "it is the address of a router")
        return self.claims.unusable({**routers, **self.own}, services, self.ranges)


class _Write(NamedTuple):
    key: Key
    version: str
    ingress: Sequence[Ingress]


class AddressWriter(PeriodicWorker, Part):
    """``record``: takes a Service, and why it lacks an address that it asks for."""

    name = "load balancer addresses"
    patience = 2.0  # seconds for the last write

    def __init__(
        self,
        cluster: ClusterState,
        inbox: Inbox,
        make_server: MakeServer | None,
        record: Callable[[Key, str], None] = lambda service, note: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        timing: Timing | None = None,
    ) -> None:
        """``make_server``: None without an API server; ``clock``: monotonic, in seconds."""
        super().__init__(self.name, LOOK_INTERVAL, steady=True)
        self._cluster, self._inbox, self._make_server = cluster, inbox, make_server
        self._record, self._clock = record, clock
        self._may_warn = object_limit(clock).allows
        self._lists = RateLimit(BURST, BURST_SECONDS, clock)
        self._backoff = Backoff(timing or Timing())
        self._paused_until = -math.inf
        self._lock = threading.Lock()
        self._waiting: dict[Key, float] = {}  # Services that lack something, and since when
        self._in_vain: set[Key] = set()  # Services that get nothing until something changes
        self._freed = math.inf  # since when an address may be free for them
        self._version = -1  # of the claims and Nodes that were seen last
        self._ready: dict[str, bool] = {}  # Nodes -> whether load balancers may use them
        self._rank = 0
        self._recheck_due = -math.inf
        self._problems: dict[str, str] = {}
        self._error: str | None = None

    def start(self) -> None:
        if not self._cluster.claims.pools:
            return
        if self._make_server:
            super().start()
        else:
            log.warning(
                "--l2-pool gives no address away: with --manifests their author writes them"
            )

    # In the agent's loop

    def observe(self, turn: Turn) -> None:
        """Note what Services lack, once everything has been listed."""
        claims = self._cluster.claims
        if not (claims.pools and self._cluster.complete):
            return
        if claims.version != self._version:
            self._version = claims.version
            self._note_nodes()
        changed, may_be_free = claims.take_changed()
        now = self._clock()
        with self._lock:
            if may_be_free:
                self._freed = min(self._freed, now)
            for key in changed:
                self._in_vain.discard(key)
                if claims.is_settled(key):
                    self._waiting.pop(key, None)
                    self._problems.pop(str(key), None)
                else:
                    self._waiting[key] = now
            if not self._waiting:
                self._problems.pop(_API, None)

    def _note_nodes(self) -> None:
        """Find this agent's place in the order of writers."""
        nodes = self._cluster.claims.nodes
        ready = {name: its.balanced for name, its in nodes.items() if its.ready}
        if ready != self._ready:
            own = self._cluster.node_name
            order = sorted(ranked(WRITER, ready.keys()), key=lambda name: not ready[name])
            self._ready = ready
            self._rank = order.index(own) if own in ready else max(1, len(order))

    def status(self) -> Mapping[str, Any]:
        with self._lock:
            problems = dict(islice(self._problems.items(), MAX_LISTED))
        return {"addresses_missing": problems} if self._cluster.claims.pools else {}

    # In the thread

    def turn(self) -> None:
        """Write what Services lack, if it is this agent's time."""
        now = self._clock()
        if now < self._paused_until:
            return
        since = now - self._rank * STAND_IN
        with self._lock:
            if self._freed <= since:
                self._waiting = dict.fromkeys(self._in_vain, self._freed) | self._waiting
                self._in_vain, self._freed = set(), math.inf
            due = {key for key, begun in self._waiting.items() if begun <= since}
        is_recheck = not self._rank and now >= self._recheck_due and bool(self._ready)
        if not (due or is_recheck) or not (self._lists.allows(None) and self._is_useful(due)):
            return
        self._recheck_due = now + RECHECK
        try:
            self._write()
        except (EbpflbError, OSError) as error:
            self._failed(error)

    def _is_useful(self, due: set[Key]) -> bool:
        """Whether a stand-in could help; without that each agent would list all Services."""
        if not self._rank:
            return True
        begun, claims = self._clock(), self._inbox.ask(self._copy).claims
        pools = tuple(pool._replace(selector=()) for pool in claims.pools)  # labels are not known
        found = allot(claims.stored.values(), pools, claims.unusable({}, {}, {}), lambda _: {})
        wrong = {it.claim.key for it in found if not it.is_written and self._is_ours(it)}
        can_be_helped = wrong | claims.former
        self._drop(due - can_be_helped, begun)
        return bool(due & can_be_helped)

    def _is_ours(self, found: Allotted) -> bool:
        """Whether this agent decides about a Service.

        A stand-in takes no address away that is in none of its pools: while a change of --l2-pool
        rolls out, agents with the old ones and agents with the new ones would undo each other's
        writes.
        """
        pools = self._cluster.claims.pools
        return not self._rank or all(ip is None or is_pooled(pools, ip) for ip in found.claim.held)

    def _drop(self, keys: set[Key], begun: float) -> None:
        """Try no more for these Services, unless they have changed since ``begun``."""
        with self._lock:
            for key in keys:
                if self._waiting.get(key, begun) <= begun:
                    self._waiting.pop(key, None)
                    self._in_vain.add(key)

    def _copy(self) -> _Known:
        cluster = self._cluster
        own = dict.fromkeys(cluster.observed[Fact.OWN_ADDRESSES], "it is the address of a node")
        ranges = dict.fromkeys(cluster.service_cidrs, "it is in the range of cluster IPs")
        return _Known(cluster.claims.copy(), own, ranges)

    def _write(self) -> None:
        """Read all Services, and write each status that is not right. Raises ClusterError."""
        assert self._make_server is not None
        begun, server = self._clock(), self._make_server()
        known = self._inbox.ask(self._copy)
        pools, former = known.claims.pools, known.claims.former
        named = any(pool.selector for pool in pools)
        found = balanced_services.read(server, with_namespaces=named)
        others, writes = dict[Address, str](), list[_Write]()
        held = {ip for claim in found.claims for ip in claim.held}
        for key, other in found.others.items():
            pooled = {ip for ip in other.held if is_pooled(pools, ip)}
            gives_back = key in former or not other.may_have
            kept_free = (
                pooled - held if gives_back else pooled
            )  # nobody gets it until it is cleared
            others |= dict.fromkeys(kept_free, "a Service of another class has it")
            if pooled and gives_back:
                writes.append(_Write(key, other.version, other.without(pooled)))
        allotted = allot(
            found.claims, pools, known.unusable(others), lambda it: found.labels.get(it, {})
        )
        result = [it for it in allotted if self._is_ours(it)]
        writes += [
            _Write(it.claim.key, it.claim.version, [Ingress(str(ip)) for ip in it.addresses])
            for it in result
            if not it.is_written
        ]
        self._note(result, self._send(server, writes), begun)

    def _send(self, server: "Server", writes: list[_Write]) -> dict[Key, str]:
        """Return why a Service's status could not be written. Raises ClusterError."""
        errors: dict[Key, str] = {}
        for key, version, ingress in writes:
            try:
                balanced_services.write(server, key, version, ingress)
            except RequestRejected as error:
                errors[key] = f"its status cannot be written: {redact(in_words(error))}"
            else:
                has = ", ".join(it.ip or it.hostname or "" for it in ingress)
                log.info("Service %s has %s", key, has or "no address")
        return errors

    def _note(self, result: list[Allotted], errors: dict[Key, str], begun: float) -> None:
        """Tell of Services that lack something; only those with an error are tried again."""
        problems = {it.claim.key: it.problem for it in result if it.problem}
        for key, problem in problems.items():
            if self._problems.get(str(key)) != problem and self._may_warn(key):
                log.warning("Service %s: %s", key, problem)
                self._record(key, problem)
        if not errors:
            self._backoff.reset()
        again = self._clock() + self._backoff.next() if errors else begun
        with self._lock:
            self._problems = {str(key): it for key, it in (problems | errors).items()}
            later = {key: since for key, since in self._waiting.items() if since > begun}
            self._waiting = dict.fromkeys(errors, again) | later
            self._in_vain |= problems.keys() - errors.keys()
        self._error = None

    def _failed(self, error: Exception) -> None:
        line, reason = "load balancer addresses cannot be written: %s", redact(in_words(error))
        self._error = log_once(log.warning, line, reason, self._error)
        with self._lock:
            self._problems = {_API: reason}
        self._paused_until = self._clock() + self._backoff.next()
