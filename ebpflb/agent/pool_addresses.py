# SPDX-License-Identifier: Apache-2.0
"""Answer for the load balancer addresses that this node owns (docs/load-balancer-addresses.md).

The loop collects what the API says: Nodes, the Services of our class, where their endpoints are
(``PoolAddresses``). A thread hears who lives on the segment and decides from that which addresses
this node answers for (``AddressOwner``); another one writes addresses into Services, on the node
that owns the pools (address_writer.py). Without --l2-pool none of it exists.
"""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address
from itertools import chain
from typing import Any, NamedTuple

from ebpflb.agent.loop import Inbox, Part, Turn
from ebpflb.agent.node_sync import NodeSync
from ebpflb.errors import EbpflbError, in_words
from ebpflb.kernel.attach.answerer import Answerer
from ebpflb.kernel.node import routes
from ebpflb.kernel.segment import Answer, Segment
from ebpflb.model import nodes
from ebpflb.model.addresses import Address
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.devices import Device
from ebpflb.model.events import Changed, Key, Kind, ObjectEvent, ReadObject, Removed, Replaced
from ebpflb.model.objects import Node, Service
from ebpflb.model.pools import Claim, Pools, read_claim, show_pools
from ebpflb.model.services import KUBERNETES
from ebpflb.plan.living_nodes import (
    BEACON_INTERVAL,
    LATE,
    SETTLED_AFTER,
    Beacon,
    Heard,
    LivingNodes,
)
from ebpflb.plan.pool_addresses import POOLS, Barred, announced, owner, preferred
from ebpflb.workers import PeriodicWorker

log = logging.getLogger(__name__)

GATHERING = 0.3  # seconds between two looks at what has changed
SHARE = 10  # the loop collects for at most one part in so many of its time
FAR_AWAY = tuple(map(ip_address, ("198.18.0.1", "2001:2::1")))  # by the default route (RFC 6890)
PROBE_SECONDS = 0.2  # that other stations have to say that they have an address
PROBED_AGAIN = 2.0  # seconds, if one has it
ANNOUNCEMENTS, ANNOUNCED_AGAIN = 3, 1.0  # of a new owner, and seconds between two
ATTACHED_AGAIN = 30.0  # seconds: somebody may have removed the program
CONFLICT_SECONDS = 60.0  # that a conflict is named after it was seen last
DIGEST = 8  # bytes


class View(NamedTuple):
    """What the loop knows, replaced as a whole.

    ``wanted``: the addresses that the cluster's nodes answer for -> the nodes that should, if any
    is better than others. ``nodes``: the addresses of each Node. ``eligible``: the Nodes that are
    ready, and not excluded from load balancers. ``devices``: the uplink by the address's version.
    """

    claims: tuple[Claim, ...] = ()
    wanted: Mapping[Address, frozenset[str]] = {}
    nodes: Mapping[str, frozenset[Address]] = {}
    ready: frozenset[str] = frozenset()
    eligible: frozenset[str] = frozenset()
    devices: Mapping[int, Device] = {}
    cluster: bytes = b""
    barred: Barred = lambda address: ""


class Seen(NamedTuple):
    """What the owner's thread tells the loop, for the status."""

    owners: Mapping[str, str] = {}
    owned: int = 0
    moves: int = 0
    conflicts: Mapping[str, str] = {}
    not_announced: str | None = None


class AddressesWritten(NamedTuple):
    """What the writer's thread tells the loop: the Services without an address, and why."""

    problems: Mapping[str, str] = {}


class PoolAddresses(Part):
    """Collects the view, and knows the status; ``show`` gets each new view."""

    name = "load balancer addresses"
    takes = (Seen, AddressesWritten, Replaced, Changed, Removed)

    def __init__(
        self,
        pools: Pools,
        cluster: ClusterState,
        node_sync: NodeSync,
        show: Callable[[View], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools, self._cluster, self._node_sync = pools, cluster, node_sync
        self._show, self._clock = show, clock
        self._nodes: dict[str, Node] = {}
        self._claims: dict[Key, Claim] = {}
        self._is_new, self._next = True, -math.inf
        self._seen, self._problems = Seen(), AddressesWritten().problems

    def take(self, message: Seen | AddressesWritten | ObjectEvent) -> None:
        """Note Nodes and Services; a change is looked at in ``turn``, many of them once."""
        match message:
            case Seen():
                self._seen, self._cluster.address_owners = message, message.owners
            case AddressesWritten(problems):
                self._problems = problems
            case _:
                self._note(message)

    def observe(self, turn: Turn) -> None:
        self._is_new |= turn.node
        for _, applied in turn.applied:
            slices = (it.after or it.before for it in applied.slices.values())
            self._is_new |= any(it and it.service in self._claims for it in slices)
            self._is_new |= KUBERNETES in applied.services

    @property
    def due(self) -> float:
        return self._next if self._is_new and self._cluster.complete else math.inf

    def turn(self) -> None:
        """Show a new view. Whatever tenants write, the loop has its time for other changes."""
        self._is_new, begun = False, self._clock()
        self._show(self._view())
        took = self._clock() - begun
        self._next = begun + max(GATHERING, SHARE * took)

    def status(self) -> Mapping[str, Any]:
        seen = self._seen
        text = f"{len(seen.owners)} announced by this cluster, {seen.owned} owned here"
        return {
            "addresses": text,
            "address_owners": seen.owners,
            "address_moves": seen.moves,
            "address_conflicts": seen.conflicts,
            "not_announced": seen.not_announced,
            "no_address": self._problems,
        }

    def _note(self, event: ObjectEvent) -> None:
        known: dict[Any, Any] = self._claims if event.kind is Kind.SERVICE else self._nodes
        if event.kind not in (Kind.SERVICE, Kind.NODE):
            return
        match event:
            case Replaced(objects=objects):
                self._is_new |= bool(known or objects)
                for key in [key for key in known if _key(event.kind, key) not in objects]:
                    del known[key]
                for key, found in objects.items():
                    self._store(key, found)
            case Changed(key=key, found=found):
                self._store(key, found)
            case Removed(key=key):
                gone = known.pop(key if event.kind is Kind.SERVICE else key.name, None)
                self._is_new |= gone is not None

    def _store(self, key: Key, found: ReadObject) -> None:
        """Store a Node, or the claim of a Service; an unreadable object keeps its last one."""
        match found.object:
            case Node() as node:
                self._is_new |= self._nodes.get(key.name) != node
                self._nodes[key.name] = node
            case Service() as service:
                former, claim = self._claims.pop(key, None), read_claim(service)
                claim = claim and claim._replace(version="")  # changes of other fields are no news
                self._is_new |= former != claim
                if claim:
                    self._claims[key] = claim

    def _view(self) -> View:
        addresses = {name: frozenset(nodes.addresses(it)) for name, it in self._nodes.items()}
        barred = self._barred(addresses)
        found = announced(self._claims.values(), self._pools, barred)
        local = {
            claim.key: self._nodes_with_endpoints(claim.key)
            for claim in self._claims.values()
            if claim.local
        }
        ready = {name: node for name, node in self._nodes.items() if nodes.ready(node)}
        return View(
            tuple(self._claims.values()),
            {at: preferred(local.get(it.key, ()) for it in its) for at, its in found.items()},
            addresses,
            frozenset(ready),
            frozenset(name for name, node in ready.items() if nodes.balanced(node)),
            self._devices(),
            self._cluster_digest(),
            barred,
        )

    def _barred(self, of_nodes: Mapping[str, frozenset[Address]]) -> Barred:
        """Return why an address cannot be a Service's."""
        gateways = {routes.route_to(each).gateway for each in FAR_AWAY}
        here = self._node_sync.device_list.addresses
        found = dict.fromkeys(chain(here, *of_nodes.values()), "is an address of a node")
        found |= dict.fromkeys(filter(None, gateways), "is a gateway")
        return lambda address: found.get(address, "")

    def _nodes_with_endpoints(self, service: Key) -> frozenset[str]:
        return frozenset(
            endpoint.name.node
            for slice in self._cluster.slices_for(service)
            for endpoint in slice.endpoints
            if endpoint.conditions.ready and endpoint.name.node
        )

    def _devices(self) -> dict[int, Device]:
        """Return the device that has the Node's address, by the address's version."""
        found: dict[int, Device] = {}
        for family, address in self._cluster.primary.items():
            for device in self._node_sync.device_list.devices:
                if device.mac and address in device.addresses:
                    found[family] = device
        return found

    def _cluster_digest(self) -> bytes:
        """Return what tells this cluster from others: its Service of the API servers."""
        ports = self._cluster.services.get(KUBERNETES, ())
        return digest(f"{ports[0].created} {ports[0].cluster_ip}" if ports else "")


def _key(kind: Kind, known: Any) -> Key:
    return known if kind is Kind.SERVICE else Key("", known)


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:DIGEST]


class AddressOwner(PeriodicWorker):
    """Hears who lives, and answers for the addresses that this node owns.

    ``view`` is set by the loop; ``writes`` says whether this node gives addresses to Services.
    """

    def __init__(
        self,
        node: str,
        pools: Pools,
        make_answerer: Callable[[], Answerer],
        inbox: Inbox,
        *,
        open_segment: Callable[[Device], Segment] = Segment,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("address owner", BEACON_INTERVAL, steady=True)
        self.view: View | None = None
        self.writes = False
        self._node, self._pools = node, digest(show_pools(pools))
        self._inbox, self._clock = inbox, clock
        self._make_answerer, self._open_segment = make_answerer, open_segment
        self._answerer: Answerer | None = None
        self._segments: dict[Device, Segment] = {}
        self._living = LivingNodes(node, self._pools)
        self._began = self._last = 0.0
        self._attach_due = self._announce_due = -math.inf
        self._heard = Heard()
        self._owners: tuple[object, dict[Address, str]] = None, {}
        self._answers: dict[Address, tuple[bytes, float]] = {}  # who said to have it, and when
        self._probing: dict[Address, float] = {}  # since when
        self._announcing: dict[Address, int] = {}  # how often more
        self._conflicts: dict[Address, tuple[str, float]] = {}
        self._moves, self._seen = 0, Seen()

    def show(self, view: View) -> None:
        """Take a new view; called by the loop."""
        self.view = view

    def run(self) -> None:
        try:
            super().run()
        finally:
            for segment in self._segments.values():
                segment.close()
            if self._answerer:
                self._answerer.close()

    def turn(self) -> None:
        """Hear, decide, tell. Raises EbpflbError or OSError."""
        try:
            if view := self.view:
                self._turn_with(view, self._clock())
        except (EbpflbError, OSError) as error:
            self.writes = False
            needed = " (needs CAP_NET_RAW)" if isinstance(error, PermissionError) else ""
            self._put(self._seen._replace(not_announced=f"{in_words(error)}{needed}"))
            raise

    def _turn_with(self, view: View, now: float) -> None:
        if self._answerer is None:
            self._answerer, self._began, self._last = self._make_answerer(), now, now
        if (gap := now - self._last - self.interval) > LATE:
            self._living.excuse(gap)
        self._last = now
        self._open(view)
        self._hear(view, now)
        heard, is_settled = self._living.living(now), now - self._began >= SETTLED_AFTER
        self._speak(view, now, able=is_settled)
        if is_settled:
            self._decide(view, heard, now)

    def _open(self, view: View) -> None:
        """Open the sockets of new uplinks, and close those of former ones."""
        wanted = set(view.devices.values())
        for device in self._segments.keys() - wanted:
            self._segments.pop(device).close()
        for device in wanted - self._segments.keys():
            self._segments[device] = self._open_segment(device)
            self._attach_due = -math.inf

    def _hear(self, view: View, now: float) -> None:
        self._living.forget_others(frozenset(view.nodes))
        places = {it: name for name, its in view.nodes.items() for it in its}
        for said in (it for segment in self._segments.values() for it in segment.take()):
            if not isinstance(said, Answer):
                if said[0].node in view.nodes and said[0].cluster == view.cluster:
                    self._living.heard(*said, now)
            elif said.address in places:
                self._living.answered(places[said.address], said.mac, now)
            elif said.address in view.wanted:
                self._answers[said.address] = said.mac, now
                self._note_contest(said, now)

    def _note_contest(self, said: Answer, now: float) -> None:
        """Announce an owned address again that another station claims, and name a stranger."""
        if said.address not in self._given:
            return
        self._announcing.setdefault(said.address, 1)
        if said.mac not in self._living.macs:
            self._conflicts[said.address] = said.mac.hex(":"), now

    def _speak(self, view: View, now: float, *, able: bool) -> None:
        beacon = Beacon(self._node, able, view.cluster, self._pools)
        for segment in self._segments.values():
            segment.send_beacon(beacon)
        asked = (view.nodes[node] for node in self._living.asked(view.nodes, now))
        for address in chain.from_iterable(asked):
            if place := self._segment(view, address):
                place.ask(address)

    def _segment(self, view: View, address: Address) -> Segment | None:
        """Return the segment of an address; None if this node has no uplink of its family."""
        return self._segments.get(view.devices.get(address.version))  # type: ignore[arg-type]

    @property
    def _given(self) -> Mapping[Address, object]:
        return self._answerer.given if self._answerer else {}

    def _decide(self, view: View, heard: Heard, now: float) -> None:
        assert self._answerer
        is_alone = not heard.agents and bool(view.ready - {self._node})
        candidates = self._candidates(view, heard)
        self.writes = not (is_alone or heard.mixed) and owner(POOLS, candidates) == self._node
        owners = self._owners_of(view, candidates)
        mine = {it for it, node in owners.items() if node == self._node}
        if is_alone:
            mine = set(self._given) & owners.keys()
        if gone := self._given.keys() - mine:
            self._answerer.withhold(gone)
        self._keep(view, mine & self._given.keys())
        blocked = dict(self._claim(view, mine - self._given.keys(), heard, now))
        if heard.all != self._heard.all:
            self._announcing |= dict.fromkeys(self._given, ANNOUNCEMENTS)
        self._heard = heard
        self._announce(view, now)
        self._attach(view, now)
        self._tell(owners, blocked, now, is_alone=is_alone)

    def _candidates(self, view: View, heard: Heard) -> frozenset[str]:
        able = heard.fresh | {self._node}
        return able & view.eligible or able

    def _owners_of(self, view: View, candidates: frozenset[str]) -> dict[Address, str]:
        """Return the owner of each address; hashed again only after a change."""
        if self._owners[0] != (candidates, view.wanted):
            found = {
                address: owner(str(address), candidates & near or candidates)
                for address, near in view.wanted.items()
            }
            self._owners = (candidates, view.wanted), found
        return self._owners[1]

    def _keep(self, view: View, addresses: set[Address]) -> None:
        """Write the answers again whose device is another one now."""
        assert self._answerer
        for address in addresses:
            if device := view.devices.get(address.version):
                self._answerer.give(address, device)
                self._segments[device].join(address)

    def _claim(
        self, view: View, addresses: set[Address], heard: Heard, now: float
    ) -> Iterator[tuple[Address, str]]:
        """Take new addresses that nobody else has; yield the others, with who has them.

        An idle node keeps what it answers for. Another living agent is about to give it up.
        """
        assert self._answerer
        self._probing = {it: at for it, at in self._probing.items() if it in addresses}
        self._answers = {it: said for it, said in self._answers.items() if it in view.wanted}
        for address in addresses & {it for it in addresses if it.version in view.devices}:
            began = self._probing.setdefault(address, now)
            mac, at = self._answers.get(address, (b"", -math.inf))
            node = self._living.macs.get(mac, "")
            if at >= began and node not in heard.fresh:
                yield address, node or mac.hex(":")
                if now - began >= PROBED_AGAIN:
                    self._probing[address] = now
            elif now - began >= PROBE_SECONDS:
                self._own(view, address)
                continue
            self._segments[view.devices[address.version]].ask(address)

    def _own(self, view: View, address: Address) -> None:
        assert self._answerer
        self._keep(view, {address})
        self._announcing[address] = ANNOUNCEMENTS
        self._announce_due = -math.inf
        self._moves += 1
        self._probing.pop(address, None)
        log.info("answering for %s from now on", address)

    def _announce(self, view: View, now: float) -> None:
        if now < self._announce_due or not self._announcing:
            return
        self._announce_due = now + ANNOUNCED_AGAIN
        for address in self._announcing.keys() & self._given.keys():
            if segment := self._segment(view, address):
                segment.announce(address)
        self._announcing = {it: left - 1 for it, left in self._announcing.items() if left > 1}

    def _attach(self, view: View, now: float) -> None:
        """Attach the program; the first time when its map is filled."""
        if self._answerer and now >= self._attach_due and self._given:
            self._answerer.attach({*view.devices.values()})
            self._attach_due = now + ATTACHED_AGAIN

    def _tell(
        self,
        owners: Mapping[Address, str],
        blocked: Mapping[Address, str],
        now: float,
        *,
        is_alone: bool,
    ) -> None:
        """Tell the loop what has changed."""
        nodes_of = {str(it): blocked.get(it, node) for it, node in owners.items()}
        strangers = {it: mac for it, mac in blocked.items() if ":" in mac}
        self._conflicts |= {it: (mac, now) for it, mac in strangers.items()}
        self._conflicts = {
            it: (mac, at)
            for it, (mac, at) in self._conflicts.items()
            if now - at < CONFLICT_SECONDS
        }
        seen = Seen(
            nodes_of,
            len(self._given),
            self._moves,
            {str(it): f"{mac} answers for it too" for it, (mac, _) in self._conflicts.items()},
            _ALONE if is_alone else None,
        )
        self._put(seen)

    def _put(self, seen: Seen) -> None:
        if seen != self._seen:
            self._seen = seen
            self._inbox.put(seen)


_ALONE = (
    "no other agent is heard on the uplink, although other Nodes are ready: this node answers for"
    " the addresses that it had, and for no others"
)
