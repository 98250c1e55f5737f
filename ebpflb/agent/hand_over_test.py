# SPDX-License-Identifier: Apache-2.0
"""Test which nodes requests may be handed to (--hand-over; docs/client-addresses.md).

A node qualifies if the routes say that its address is at the segment of an uplink, and if its MAC
address is no router's: a router would send the packet back. Then both legs are tested, before use
and every minute: a question to its MAC address, from a client's address to a load balancer address,
and its program's answer (bpf/path/leg_test.h), which also comes while no agent runs there. Both
addresses are the operator's or reserved: none that a Service has makes the network act on tests.

The loop makes the view, a thread tests. With --hand-over=off neither runs.
"""

import logging
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from enum import Enum, auto
from functools import partial
from ipaddress import ip_address
from itertools import islice
from typing import Any, NamedTuple

from ebpflb.agent.loop import Call, Inbox, Part, Turn
from ebpflb.agent.node_sync import NodeSync
from ebpflb.errors import EbpflbError, in_words
from ebpflb.kernel.node import routes
from ebpflb.kernel.node.routes import Route
from ebpflb.kernel.segment import LegTest, Segment
from ebpflb.model import nodes
from ebpflb.model.addresses import Address, Family, family
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.devices import Device, outer
from ebpflb.model.events import MAX_LISTED
from ebpflb.model.hand_over import Hop, Hops
from ebpflb.model.services import PortName
from ebpflb.stopping import parts
from ebpflb.workers import PeriodicWorker

log = logging.getLogger(__name__)

INTERVAL = 1.0  # seconds between two looks at what is due
EVERY = 60.0  # seconds between two tests of a node
AGAIN, SILENT_AGAIN = 5.0, 10.0  # seconds, if a test fails: of a node that is believed, or not
SOON, STARTING = 2.0, 30.0  # seconds, for the first seconds: other agents start, too
FAILED = 3  # tests, until a node is not believed any more
TRIES, WAIT = 4, 0.3  # of a test, and seconds after each
AT_ONCE = 64  # nodes of a test: so their answers fit into a socket's buffer


class Asked(Enum):
    """What is asked of a node at once."""

    PROGRAM = auto()  # between the nodes' own addresses
    ADDRESS = auto()  # from this node to the load balancer address: its answer comes from there
    ALL = auto()  # from a client to the load balancer address: so are requests handed over


# A client, and a load balancer address without --l2-pool: for benchmarks (RFC 6890).
_CLIENTS = {Family.IPV4: ip_address("198.18.235.1"), Family.IPV6: ip_address("2001:2::eb:1")}
_RESERVED = {Family.IPV4: ip_address("198.18.235.2"), Family.IPV6: ip_address("2001:2::eb:2")}
SILENT = "answers no test: it is down, or its agent is older or has --hand-over=off"
NOBODY = "is an address of no station: the node is down"


class View(NamedTuple):
    """What the loop knows, replaced as a whole.

    ``nodes``: the other Nodes' addresses. ``own``: this Node's. ``uplinks``: the devices that have
    one of them, by index. ``addresses``: the load balancer addresses to test with.
    """

    nodes: Mapping[str, tuple[Address, ...]]
    own: Mapping[Family, Address]
    uplinks: Mapping[int, Device]
    addresses: Mapping[Family, Address]


class Place(NamedTuple):
    """A node's address at the segment of an uplink, with the uplink's own MAC address."""

    node: str
    address: Address
    ifindex: int
    own: str

    @property
    def family(self) -> Family:
        return family(self.address)


class _Tested(NamedTuple):
    """``failed``: how many tests have failed since one that passed; ``due``: when the next one is.

    ``blocked``: the problem is not that the node is silent.
    """

    mac: bytes = b""
    failed: int = FAILED
    due: float = -math.inf
    problem: str = "is not tested yet"
    blocked: bool = False

    @property
    def is_believed(self) -> bool:
        return self.failed < FAILED

    def then(self, now: float, problem: str, most: float) -> "_Tested":
        """Return the state after a test; ``problem``: "" if it has passed; ``most``: seconds until
        the next test of one that has not.
        """
        failed = self.failed + 1 if problem else 0
        pause = min(AGAIN if failed < FAILED else SILENT_AGAIN, most) if problem else EVERY
        return _Tested(self.mac, failed, now + pause, problem, problem not in ("", SILENT, NOBODY))


class HandOverTest(PeriodicWorker, Part):
    """``hops``: the result, replaced as a whole by the loop. None before the first one: until then
    what a former agent has found stays.
    """

    name = "tests of the hand-over"
    _outer: tuple[Device, ...] = ()  # where requests may come in

    def __init__(
        self,
        cluster: ClusterState,
        node_sync: NodeSync,
        inbox: Inbox,
        *,
        asked: bool,
        dropped: Mapping[PortName, Mapping[str, str]] = {},
        former: Iterable[tuple[Family, str]] = (),
        route_to: Callable[[Address], Route] = routes.route_to,
        routers: Callable[[], Collection[Address]] = routes.routers,
        open_segment: Callable[[Device], Segment] = Segment,
        open_test: Callable[[Device], LegTest] = LegTest,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """``asked``: it is wanted for every Service, not only for those that ask for it, or have
        policy Local: only then what blocks it is a condition. ``dropped``: of service ports the
        addresses that rules drop, with a sentence; the loop may change it. ``former``: MAC
        addresses that a former agent has believed: as it did, until FAILED tests have failed.
        """
        super().__init__(self.name, INTERVAL, steady=True)
        self._cluster, self._node_sync, self._inbox = cluster, node_sync, inbox
        self._asked, self._dropped, self._former = asked, dropped, {*former}
        self._clock, self._route_to, self._routers_now = clock, route_to, routers
        self._open_segment, self._open_test = open_segment, open_test
        self._wait = wait or self.stopped.wait  # which returns whether the thread is to end
        self.hops: Hops | None = None
        self._believed = set[str]()  # nodes
        self._told: tuple[Hops, dict[str, str]] | None = None
        self._began = clock()
        self.is_new, self._view_due = True, -math.inf
        self._seen = -1  # version of the Nodes
        self.view: View | None = None
        self._routed: View | None = None  # of what is found, which the routes may change
        self._found: tuple[list[Place], dict[str, str]] = [], {}
        self._routes_due = -math.inf
        self._tested: dict[Place, _Tested] = {}
        self._routers: dict[Address, set[bytes]] = {}  # with their MAC addresses
        self._blocked = dict[str, str]()  # what the network or a router is to blame for

    # In the agent's loop

    def observe(self, turn: Turn) -> None:
        """Note whether the view may be another one; the thread asks for it."""
        version = self._cluster.claims.version
        self.is_new |= turn.node or version != self._seen
        self._seen = version

    def status(self) -> Mapping[str, Any]:
        if not (self.hops and self.view):
            return {}
        rules = islice((it for its in self._dropped.values() for it in its.items()), MAX_LISTED)
        dropped, is_asked = dict(rules), self._asked or bool(self._cluster.with_keep_client)
        return {
            "hand_over": f"to {len(self._believed)} of {len(self.view.nodes)} other nodes",
            "not_handed_to": {**self.hops.blocked, **dropped},
            "not_handed_at": self._not_handed_at(),
            "hand_over_blocked": {**self._blocked, **dropped} if is_asked else {},
        }

    def _not_handed_at(self) -> dict[str, str]:
        """Return the devices with requests that cannot be handed over, and why."""
        used = {hop.device for hop in self.hops.believed} if self.hops else set()
        why = f"other nodes' addresses are at {' and '.join(sorted(it.name for it in used))}"
        indexes = {it.index for it in used}
        others = (it for it in self._outer if used and it.index not in indexes)
        return {it.name: f"requests that come in there are not handed over: {why}" for it in others}

    def _make_view(self) -> None:
        if not (self._cluster.complete and self._node_sync.device_list.devices):
            return
        self.is_new, cluster = False, self._cluster
        known = {name: it.addresses for name, it in cluster.claims.nodes.items()}
        mine = nodes.addresses(cluster.node) if cluster.node else ()
        own = {*mine, *cluster.primary.values()}
        uplinks = {
            device.index: device
            for device in self._node_sync.device_list.devices
            if device.mac and not own.isdisjoint(device.addresses)
        }
        known.pop(cluster.node_name, None)
        pods = [net for it in cluster.claims.nodes.values() for net in it.pods]
        self._outer = tuple(outer(self._node_sync.device_list.devices, pods))
        taken = own.union(*known.values())
        ranges = [it for pool in cluster.admission.pools for it in pool.ranges]
        usual = {family(it.first): it.first for it in reversed(ranges) if it.first not in taken}
        self.view = View(known, {**cluster.primary}, uplinks, {**_RESERVED, **usual})

    def _take(self, hops: Hops, blocked: dict[str, str]) -> None:
        before, now = self._believed, {hop.node for hop in hops.believed}
        self.hops, self._believed, self._blocked = hops, now, blocked
        for node in now - before:
            log.info("requests may be handed to node %s", node)
        for node in before - now:
            log.info(
                "no request is handed to node %s: %s", node, hops.blocked.get(node, "it is gone")
            )

    # In the thread

    def turn(self) -> None:
        """Test what is due. Raises EbpflbError or OSError."""
        now = self._clock()
        if self.is_new and now >= self._view_due:
            self._view_due = now + (AGAIN if self.view else INTERVAL)
            self._inbox.put(Call(partial(parts.attempt, f"view: {self.name}", self._make_view)))
        if (view := self.view) is None:
            return
        try:
            self._turn_with(view, now)
        except (EbpflbError, OSError) as error:
            needed = " (needs CAP_NET_RAW)" if isinstance(error, PermissionError) else ""
            why = dict.fromkeys(view.nodes, f"cannot be tested: {in_words(error)}{needed}")
            self._tested = {}
            self._show(Hops(blocked=why, uplinks=(*view.uplinks.values(),)), why)
            raise

    def _turn_with(self, view: View, now: float) -> None:
        if view is not self._routed or now >= self._routes_due:
            self._found = self._places(view)
            self._routed, self._routes_due = view, now + SILENT_AGAIN
        places, elsewhere = self._found
        self._tested = {at: self._tested.get(at, _Tested()) for at in places}
        for index, device in view.uplinks.items():
            due = [at for at in places if at.ifindex == index and self._tested[at].due <= now]
            for first in range(0, len(due), AT_ONCE):
                if not self.stopped.is_set():
                    self._test(view, device, due[first : first + AT_ONCE])
        self._tell(view, places, elsewhere)

    def _places(self, view: View) -> tuple[list[Place], dict[str, str]]:
        """Return where nodes are, at most one address of a family, and why others are elsewhere."""
        found, elsewhere = dict[tuple[str, Family], Place](), dict[str, str]()
        for node, addresses in sorted(view.nodes.items()):
            for address in addresses:
                if (of := (node, family(address))) in found or of[1] not in view.own:
                    continue
                route = self._route_to(address)
                device = view.uplinks.get(route.ifindex)
                if device is None or route.local or route.gateway is not None:
                    elsewhere[node] = _elsewhere(address, route)
                else:
                    found[of] = Place(node, address, device.index, device.mac)
        return [*found.values()], elsewhere

    def _test(self, view: View, device: Device, places: list[Place]) -> None:
        """Test these places, which are on the segment of this device."""
        with closing(self._open_segment(device)) as segment:
            stations = self._find(segment, places)
        for at in places:
            mac = min(stations.get(at.address, {b""}))
            if mac not in (b"", self._tested[at].mac):
                was = (at.family, mac.hex(":"))
                self._tested[at] = _Tested(mac, 0 if was in self._former else FAILED)
                self._former.discard(was)
        nodes_at = Counter(mac for mac, _ in {(it.mac, at.node) for at, it in self._tested.items()})
        not_one = {mac for mac, count in nodes_at.items() if count > 1}.union(
            *self._routers.values()
        )
        problems = {at: _no_neighbour(stations.get(at.address, set()), not_one) for at in places}
        with closing(self._open_test(device)) as test:
            passed = self._ask(view, test, [at for at in places if not problems[at]])
        now = self._clock()
        most = SOON if now - self._began < STARTING else math.inf
        for at in places:
            problem = problems[at] or _lost(view.addresses[at.family], passed[at])
            self._tested[at] = self._tested[at].then(now, problem, most)

    def _find(self, segment: Segment, places: list[Place]) -> dict[Address, set[bytes]]:
        """Return the stations that have the places' addresses; note those of routers."""
        found = dict[Address, set[bytes]]()
        known = {at.address: self._tested[at].mac for at in places}
        routers = dict.fromkeys(self._routers_now(), b"")
        for attempt in range(TRIES):
            waiting = [it for it in (*known, *routers) if it not in found]
            for address in waiting:
                mac = b"" if attempt else known.get(address, b"")  # all stations, later on
                segment.ask(address, *[mac][: len(mac)])
            if not waiting or self._wait(WAIT):
                break
            for address, mac in segment.take():
                if mac != segment.mac:
                    found.setdefault(address, set()).add(mac)
        self._routers = {it: found.get(it) or self._routers.get(it, set()) for it in routers}
        return found

    def _ask(self, view: View, test: LegTest, places: list[Place]) -> dict[Place, set[Asked]]:
        """Return what has been answered, for each place."""
        found = defaultdict[Place, set[Asked]](set)
        marks = {os.urandom(8): (at, what) for at in places for what in Asked}
        for _ in range(TRIES):
            for mark, (at, what) in marks.items():
                if not found[at] & {what, Asked.ALL}:
                    source = _CLIENTS[at.family] if what is Asked.ALL else view.own[at.family]
                    to = at.address if what is Asked.PROGRAM else view.addresses[at.family]
                    test.ask(self._tested[at].mac, source, to, mark)
            if self._wait(WAIT):
                break
            for mac, mark in test.take():
                if (of_mark := marks.get(mark)) and mac == self._tested[of_mark[0]].mac:
                    found[of_mark[0]].add(of_mark[1])
            if all(Asked.ALL in found[at] for at in places):
                break
        return found

    def _tell(self, view: View, places: list[Place], elsewhere: Mapping[str, str]) -> None:
        believed, silent, blocked = list[Hop](), dict[str, str](elsewhere), dict[str, str]()
        for at in places:
            its = self._tested[at]
            if its.is_believed:
                believed.append(Hop(at.node, at.address, view.uplinks[at.ifindex], its.mac))
            else:
                (blocked if its.blocked else silent)[at.node] = f"{at.address} {its.problem}"
        macs = frozenset(it.mac for it in self._tested.values()).difference(
            {b""}, *self._routers.values()
        )
        both, uplinks = {**silent, **blocked}, (*view.uplinks.values(),)
        self._show(Hops(tuple(believed), macs, both, uplinks), blocked)

    def _show(self, hops: Hops, blocked: dict[str, str]) -> None:
        if (told := (hops, blocked)) != self._told:
            self._told = told
            self._inbox.put(Call(partial(self._take, *told)))


def _elsewhere(address: Address, route: Route) -> str:
    if route.gateway is not None:
        return f"{address} is on another segment: behind the router {route.gateway}"
    if not route.ifindex:
        return f"{address} cannot be reached: {route.why}"
    return (
        f"{address} is not at an uplink: {route.device} has no MAC address, or none of this Node's"
        " addresses"
    )


def _no_neighbour(stations: set[bytes], not_one: set[bytes]) -> str:
    """Return why nothing is handed to the stations with an address; "" if they are tested.

    ``not_one``: MAC addresses of routers, and those that several nodes have.
    """
    if not stations:
        return NOBODY
    if len(stations) > 1:
        return f"is an address of {' and '.join(sorted(it.hex(':') for it in stations))}"
    if stations & not_one:
        (mac,) = stations
        return f"is answered for by a router ({mac.hex(':')}), which would send packets back"
    return ""


def _lost(address: Address, answered: set[Asked]) -> str:
    """Return why a test was not passed; "" if it was."""
    if Asked.ALL in answered:
        return ""
    if Asked.ADDRESS in answered:
        return "gets nothing that this node sends from clients' addresses: the network drops it"
    if Asked.PROGRAM in answered:
        return f"and this node cannot exchange packets of {address}: the network drops them"
    return SILENT
