# SPDX-License-Identifier: Apache-2.0
"""Answer for the load balancer addresses that this node owns (docs/load-balancer-addresses.md).

The owner of an address is the first of its candidates that lives: three nodes by rendezvous hashing
(model/pools.py). An agent probes the other candidates by an ARP question that their node's program
answers (bpf/hooks/answer.c), as long as the agent there has run lately. The node of a dead agent
goes on answering for its addresses: a new owner asks first, and takes none that is answered for. A
former owner answers until the new one does.

The loop makes the view, a thread probes and decides. Without --l2-pool neither exists.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from ebpflb.agent.loop import Call, Inbox, Part, Turn
from ebpflb.agent.node_sync import NodeSync
from ebpflb.errors import EbpflbError, in_words
from ebpflb.kernel.attach.uplink_program import Answerer
from ebpflb.kernel.node import routes
from ebpflb.kernel.node.routes import Route
from ebpflb.kernel.segment import Segment
from ebpflb.model.addresses import Address
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.devices import Device, Devices
from ebpflb.model.events import Key
from ebpflb.model.pools import AGENT, PROGRAM, Pools, announced, preferred, probed_address, ranked
from ebpflb.model.services import KUBERNETES
from ebpflb.stopping import parts
from ebpflb.workers import PeriodicWorker

log = logging.getLogger(__name__)

INTERVAL = 0.2  # seconds between two probes
DEAD_AFTER = 0.75  # seconds without an answer
DOUBTED_AFTER = DEAD_AFTER / 2  # from then on others ask who answers for its addresses
LATE = 0.3  # seconds that a turn comes late: then silence says nothing about others
SETTLED_AFTER = 1.5  # seconds from the start, until all who live have answered
AGENT_SECONDS = 15.0  # that a node counts as alive without its agent: longer than a restart
RENEWED = 3.0  # seconds
SILENT_FOR_LONG, ASKED_AGAIN = 5.0, 1.0  # seconds: who is silent for long is asked less often
CANDIDATES = 3  # of an address
CLAIM_SECONDS = 0.35  # that other stations have to say that they have an address: two questions
CLAIMED_AGAIN = 2.0  # seconds, if one has it
LEFT_SECONDS = 3.0  # that a former owner answers at most while the new one does not
FORMER_SECONDS = 5.0  # that candidates of before are probed: they may answer, and are no strangers
ANNOUNCEMENTS, ANNOUNCED_AGAIN = 3, 1.0  # of a new owner, and seconds between two
ATTACHED_AGAIN = 30.0  # seconds: somebody may have removed the program
CONFLICT_SECONDS = 60.0  # that a conflict is named after it was seen last
SHARE = 10  # the loop makes views for at most a tenth of its time
_ALONE = (
    "no other node is heard on the uplink, although others are Ready: this node answers for the"
    " addresses that it had, and for no others"
)


class View(NamedTuple):
    """What the loop knows, replaced as a whole.

    ``wanted``: the addresses that nodes answer for -> the nodes that should, if any is better than
    others. ``nodes``: those that may, of the ``known`` ones. ``uplink``: where they are answered
    for; ``elsewhere``: why some are not, or "".
    """

    wanted: Mapping[Address, frozenset[str]]
    nodes: frozenset[str]
    known: frozenset[str]
    uplink: Device | None
    cluster: str
    elsewhere: str = ""


class Seen(NamedTuple):
    """What the thread knows, for the status; ``living``: nodes that are heard, and this one."""

    owners: Mapping[str, str] = {}
    living: frozenset[str] = frozenset()
    owned: int = 0
    moves: int = 0
    conflicts: Mapping[str, str] = {}
    not_announced: str | None = None


class AddressOwner(PeriodicWorker, Part):
    """``make_answerer``: opens the program's map, in the thread."""

    name = "answers for addresses"

    def __init__(
        self,
        cluster: ClusterState,
        node_sync: NodeSync,
        make_answerer: Callable[[], Answerer],
        inbox: Inbox,
        *,
        open_segment: Callable[[Device], Segment] = Segment,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock``: monotonic, in seconds."""
        super().__init__(self.name, INTERVAL, steady=True)
        self._cluster, self._node_sync, self._inbox = cluster, node_sync, inbox
        self._make_answerer, self._open_segment, self._clock = make_answerer, open_segment, clock
        self._node = cluster.node_name
        self.is_new, self._version, self._view_due = True, -1, -math.inf
        self._near: dict[Key, frozenset[str]] = {}  # read again only after a change of the slices
        self.view: View | None = None
        self._answerer: Answerer | None = None
        self._segment: Segment | None = None
        self._began = self._last = 0.0
        self._heard: dict[str, float] = {}  # node -> when it answered last
        self.macs: dict[str, bytes] = {}  # node -> its MAC address
        self._living: frozenset[str] = frozenset()
        self._orders: tuple[View | None, dict[Address, list[str]]] = None, {}
        self._company: set[str] = set()  # nodes that say whether anybody hears this one
        self._former: dict[str, float] = {}  # candidates of before, and until when they are probed
        self.answers: dict[Address, tuple[bytes, float]] = {}  # who said to have it, and when
        self._claiming: dict[Address, float] = {}  # since when
        self._leaving: dict[Address, float] = {}  # to a new owner, since when
        self._announcing: dict[Address, int] = {}  # how often more
        self._doubted: dict[Address, tuple[bytes, float]] = {}  # claimed by whom, and since when
        self._conflicts: dict[Address, tuple[str, float]] = {}
        self._renew_due = self._ask_all_due = self._announce_due = self._attach_due = -math.inf
        self._moves, self.seen = 0, Seen()

    def start(self) -> None:
        if self._cluster.claims.pools:
            super().start()

    # In the agent's loop

    def observe(self, turn: Turn) -> None:
        """Note whether the view may be another one; the thread asks for it."""
        claims = self._cluster.claims
        if not claims.pools:
            return
        self.is_new |= turn.node or claims.version != self._version
        for _, applied in turn.applied:
            slices = chain.from_iterable(applied.slices.values())
            for service in {it.service for it in slices if it}:
                self._near.pop(service, None)
                self.is_new |= claims.is_local(service)
            self.is_new |= KUBERNETES in applied.services
        self._version = claims.version

    def status(self) -> Mapping[str, Any]:
        if not self._cluster.claims.pools:
            return {}
        seen = self.seen
        self._cluster.address_owners, self._cluster.address_nodes = seen.owners, seen.living
        return {
            "addresses": f"{len(seen.owners)} announced by this cluster, {seen.owned} owned here",
            "address_owners": seen.owners,
            "address_nodes": sorted(seen.living),
            "address_moves": seen.moves,
            "address_conflicts": seen.conflicts,
            "not_announced": seen.not_announced,
        }

    def _make_view(self) -> None:
        """Make the view; whatever tenants write, the loop has its time for other changes."""
        if not self._cluster.complete:
            return
        self.is_new, begun = False, self._clock()
        cluster, devices = self._cluster, self._node_sync.device_list
        claims = cluster.claims
        own = dict.fromkeys((*devices.addresses, *routes.routers()), "a node's or a router's")
        found = announced(claims.stored.values(), claims.pools, claims.unusable(own, {}, {}))
        near = {it.key: self._nodes_with_endpoints(it.key) for its in found.values() for it in its}
        self._near = {key: nodes for key, nodes in self._near.items() if key in near}
        uplink, elsewhere = uplink_of(
            claims.pools, devices.devices, [*cluster.primary.values()], routes.route_to
        )
        ports = cluster.services.get(KUBERNETES, ())
        self.view = View(
            {at: preferred([near[it.key] for it in its]) for at, its in found.items()},
            claims.answering(),
            frozenset(claims.nodes),
            uplink,
            f"{ports[0].created} {ports[0].cluster_ip}" if ports else "",
            elsewhere,
        )
        self._view_due = self._clock() + SHARE * (self._clock() - begun)

    def _nodes_with_endpoints(self, service: Key) -> frozenset[str]:
        """Return the nodes that serve a Service with policy Local; empty: all do.

        As in kube-proxy, endpoints that terminate serve while none is ready.
        """
        if not self._cluster.claims.is_local(service):
            return frozenset()
        if service not in self._near:
            ready, leaving = set[str](), set[str]()
            for slice in self._cluster.slices_for(service):
                for endpoint in slice.endpoints:
                    if endpoint.conditions.ready:
                        ready.add(endpoint.name.node)
                    elif endpoint.conditions.serving and endpoint.conditions.terminating:
                        leaving.add(endpoint.name.node)
            self._near[service] = frozenset(ready - {""} or leaving - {""})
        return self._near[service]

    # In the thread

    def run(self) -> None:
        try:
            super().run()
        finally:
            for opened in (self._segment, self._answerer):
                if opened:
                    opened.close()

    def turn(self) -> None:
        """Hear, decide, tell. Raises EbpflbError or OSError."""
        now = self._clock()
        if self.is_new and now >= self._view_due:
            self._view_due = now + INTERVAL
            self._inbox.put(Call(partial(parts.attempt, f"view: {self.name}", self._make_view)))
        try:
            if self.view:
                self._turn_with(self.view, now)
        except (EbpflbError, OSError) as error:
            needed = " (needs CAP_NET_RAW)" if isinstance(error, PermissionError) else ""
            self._show(self.seen._replace(not_announced=f"{in_words(error)}{needed}"))
            raise

    def _turn_with(self, view: View, now: float) -> None:
        if self._answerer is None:
            self._answerer, self._began, self._last = self._make_answerer(), now, now
        if (gap := now - self._last - INTERVAL) > LATE:  # this agent did not run
            self._heard = {node: at + gap for node, at in self._heard.items()}
        self._last = now
        if view.uplink is None:
            no_uplink = "no device is on the segment of the pools, or has the Node's address"
            self._show(self.seen._replace(not_announced=no_uplink))
            return
        if self._segment is None or self._segment.device != view.uplink:
            self._open(view.uplink)
        orders = self._orders_of(view, now)
        peers = self._peers(view, orders, now)
        self._hear(view, peers, now)
        if now >= self._renew_due:
            self._renew_due = now + RENEWED
            for whose, seconds in ((AGENT, AGENT_SECONDS), (PROGRAM, math.inf)):
                own = probed_address(view.cluster, self._node, whose)
                self._answerer.live(own, view.uplink, seconds)
            self._attach(view.uplink, now)
        self._ask(view, peers, now)
        if now - self._began >= SETTLED_AFTER:
            self._decide(view, orders, peers, now)

    def _open(self, uplink: Device) -> None:
        """Open the sockets at a new uplink, and answer there for what this node has.

        They are announced again, because another uplink, or a bond, may have another MAC address.
        """
        assert self._answerer
        if self._segment:
            self._segment.close()
            self._announcing |= dict.fromkeys(self._answerer.given, ANNOUNCEMENTS)
        self._segment = self._open_segment(uplink)
        self._renew_due = self._attach_due = -math.inf
        for address in [*self._answerer.given]:
            self._give(address)

    def _give(self, address: Address) -> None:
        assert self._answerer and self._segment
        self._answerer.give(address, self._segment.device)
        self._segment.join(address)

    def _orders_of(self, view: View, now: float) -> dict[Address, list[str]]:
        """Return the candidates of each address; hashed again only where something has changed."""
        before, orders = self._orders
        if before is view:
            return orders
        known = before.wanted if before and before.nodes == view.nodes else {}
        found = {
            address: orders[address]
            if known.get(address) == near
            else ranked(str(address), near & view.nodes or view.nodes)[:CANDIDATES]
            for address, near in view.wanted.items()
        }
        mine = {at for at, order in found.items() if self._node in order}
        former = {it for at in mine for it in orders.get(at, ()) if it not in found[at]}
        self._former = {it: at for it, at in self._former.items() if at > now}
        if not former <= self._former.keys():
            self._ask_all_due = now
        self._former |= dict.fromkeys(former, now + FORMER_SECONDS)
        self._company = {*ranked(self._node, view.nodes - {self._node})[: CANDIDATES - 1]}
        self._orders = view, found
        return found

    def _peers(self, view: View, orders: Mapping[Address, list[str]], now: float) -> set[str]:
        """Return the nodes to probe: other candidates, also former ones and those of addresses that
        this node leaves, and some to know whether anybody hears.
        """
        assert self._answerer
        given = self._answerer.given
        found = {
            node
            for at, order in orders.items()
            if self._node in order or at in given
            for node in order
        }
        found |= {node for node, until in self._former.items() if until > now} & view.known
        return (found | self._company) - {self._node}

    def _hear(self, view: View, peers: set[str], now: float) -> None:
        assert self._segment and self._answerer
        self._heard = {
            node: at
            for node, at in self._heard.items()
            if node in peers or (node in view.known and now - at < DEAD_AFTER)
        }
        self.macs = {node: mac for node, mac in self.macs.items() if node in view.known}
        places = {probed_address(view.cluster, it, AGENT): it for it in peers}
        programs = {probed_address(view.cluster, it, PROGRAM): it for it in peers}
        for address, mac in self._segment.take():
            if mac == self._segment.mac:  # a switch sends a bond its own frames back
                continue
            if node := places.get(address):
                self._heard[node] = now
            if node := node or programs.get(address):
                self.macs[node] = mac
            elif address in view.wanted:
                self.answers[address] = mac, now
                if address in self._answerer.given and mac not in self.macs.values():
                    self._doubted.setdefault(address, (mac, now))
                    self._ask_all_due = now  # it may be a node with a new network card
        self._contradict(now)

    def _contradict(self, now: float) -> None:
        """Announce the addresses that another station has claimed, unless it is a node by now."""
        assert self._answerer
        waited = {it: said for it, said in self._doubted.items() if now - said[1] >= CLAIM_SECONDS}
        for address, (mac, _) in waited.items():
            del self._doubted[address]
            if address in self._answerer.given and mac not in self.macs.values():
                self._announcing.setdefault(address, 1)
                self._conflicts[address] = mac.hex(":"), now

    def _ask(self, view: View, peers: set[str], now: float) -> None:
        """Probe the peers: the station that answered last, after some silence all stations."""
        assert self._segment
        if all_now := now >= self._ask_all_due:
            self._ask_all_due = now + ASKED_AGAIN
        for node in peers:
            silent = now - self._heard.get(node, -math.inf)
            address = probed_address(view.cluster, node, AGENT)
            if silent < DEAD_AFTER / 2:
                self._segment.ask(address, self.macs[node])
            elif silent < SILENT_FOR_LONG or all_now:
                self._segment.ask(address)
            if silent >= DEAD_AFTER and all_now:  # to know it from a stranger
                self._segment.ask(probed_address(view.cluster, node, PROGRAM))

    def _decide(
        self, view: View, orders: Mapping[Address, list[str]], peers: set[str], now: float
    ) -> None:
        assert self._answerer
        stations = Counter(self.macs.values())  # a router may answer for all (proxy ARP)
        living = frozenset(
            node
            for node, at in self._heard.items()
            if now - at < DEAD_AFTER and stations[self.macs[node]] == 1
        )
        is_alone = bool(peers) and living.isdisjoint(peers)
        silent = peers - living
        doubted = {it for it in peers if now - self._heard.get(it, -math.inf) >= DOUBTED_AFTER}
        owners, next_owners = _owners(orders, silent), _owners(orders, silent | doubted)
        mine = {it for it, node in owners.items() if node == self._node}
        soon = {it for it, node in next_owners.items() if node == self._node}
        if is_alone:
            mine = soon = self._answerer.given.keys() & owners.keys()
            owners = {it: at for it, at in owners.items() if it in mine or at != self._node}
        self._leave(self._answerer.given.keys() - mine, owners, now)
        blocked = dict(self._claim((mine | soon) - self._answerer.given.keys(), mine, living, now))
        asked = self._claiming.keys() | self._leaving.keys()
        self.answers = {it: said for it, said in self.answers.items() if it in asked}
        if living != self._living:
            self._announcing |= dict.fromkeys(self._answerer.given, ANNOUNCEMENTS)
        self._living = living
        self._announce(now)
        self._tell(owners, blocked, now, _ALONE if is_alone else view.elsewhere)

    def _leave(self, addresses: set[Address], owners: Mapping[Address, str], now: float) -> None:
        """Stop answering for addresses once the new owner answers or has had time to answer.

        Stop at once for an address that no Service has.
        """
        assert self._answerer and self._segment
        self._leaving = {it: self._leaving.get(it, now) for it in addresses}
        gone = set[Address]()
        for address, began in self._leaving.items():
            mac, at = self.answers.get(address, (b"", -math.inf))
            is_taken = at >= began and mac == self.macs.get(owners.get(address, ""))
            if is_taken or address not in owners or now - began >= LEFT_SECONDS:
                gone.add(address)
            else:
                self._segment.ask(address)
        if gone:
            self._answerer.withhold(gone)
            self._leaving = {it: at for it, at in self._leaving.items() if it not in gone}
            log.info("no longer answering for %s", ", ".join(map(str, gone)))

    def _claim(
        self, addresses: set[Address], mine: set[Address], living: frozenset[str], now: float
    ) -> Iterator[tuple[Address, str]]:
        """Take the new addresses in ``mine`` that no other station has; yield the rest of ``mine``,
        each with the station that has it.

        A node whose agent is dead keeps what it answers for. Another living agent is about to give
        it up.
        """
        assert self._segment
        self._claiming = {it: at for it, at in self._claiming.items() if it in addresses}
        nodes = {mac: node for node, mac in self.macs.items()}
        for address in addresses:
            began = self._claiming.setdefault(address, now)
            mac, at = self.answers.get(address, (b"", -math.inf))
            if at >= began and nodes.get(mac) not in living:
                if address in mine and now - began >= CLAIM_SECONDS:  # until then it may be a node
                    yield address, nodes.get(mac, mac.hex(":"))
                if now - began >= CLAIMED_AGAIN:
                    self._claiming[address] = now
            elif now - began >= CLAIM_SECONDS and address in mine:
                self._own(address)
                continue
            self._segment.ask(address)

    def _own(self, address: Address) -> None:
        self._give(address)
        self._announcing[address] = ANNOUNCEMENTS
        self._announce_due = -math.inf
        self._moves += 1
        del self._claiming[address]
        log.info("answering for %s from now on", address)

    def _announce(self, now: float) -> None:
        assert self._answerer and self._segment
        if now < self._announce_due or not self._announcing:
            return
        self._announce_due = now + ANNOUNCED_AGAIN
        for address in self._announcing.keys() & self._answerer.given.keys():
            self._segment.announce(address)
        self._announcing = {it: left - 1 for it, left in self._announcing.items() if left > 1}

    def _attach(self, uplink: Device, now: float) -> None:
        """Attach the program, once its map is filled; again if somebody has removed it."""
        assert self._answerer
        if now >= self._attach_due:
            self._answerer.attach([uplink])
            self._attach_due = now + ATTACHED_AGAIN

    def _tell(
        self,
        owners: Mapping[Address, str],
        blocked: Mapping[Address, str],
        now: float,
        not_announced: str,
    ) -> None:
        assert self._answerer
        self._conflicts |= {it: (mac, now) for it, mac in blocked.items() if ":" in mac}
        self._conflicts = {
            it: (mac, at)
            for it, (mac, at) in self._conflicts.items()
            if now - at < CONFLICT_SECONDS
        }
        self._show(
            Seen(
                {str(it): blocked.get(it, node) for it, node in owners.items()},
                self._living | {self._node},
                len(self._answerer.given),
                self._moves,
                {str(it): f"{mac} answers for it too" for it, (mac, _) in self._conflicts.items()},
                not_announced or None,
            )
        )

    def _show(self, seen: Seen) -> None:
        if seen != self.seen:
            self.seen = seen
            self._inbox.put(Call(lambda: None))  # the loop publishes it


def uplink_of(
    pools: Pools,
    devices: Devices,
    primary: Sequence[Address],
    route_to: Callable[[Address], Route],
) -> tuple[Device | None, str]:
    """Return the device on whose segment the pools are, or else the one with the Node's address;
    and why an address of a pool is not answered for.

    ``primary``: the Node's addresses. Raises OSError.
    """
    by_index = {it.index: it for it in devices if it.mac and it.addresses}
    of_node = [it for at in primary for it in by_index.values() if at in it.addresses]
    found: dict[int, Address] = {}
    for address in (end for pool in pools for each in pool.ranges for end in each):
        route = route_to(address)
        if route.gateway is None and not route.local and route.ifindex in by_index:
            found.setdefault(route.ifindex, address)
    near = next((it for it in of_node if it.index in found), None)
    uplink = near or next((by_index[it] for it in found), None) or next(iter(of_node), None)
    name = uplink.name if uplink else "none"
    others = (
        f"{at} is an address on the segment of {by_index[it].name}, but nodes answer at one device"
        f" alone, here {name}"
        for it, at in found.items()
        if by_index[it] is not uplink
    )
    return uplink, next(others, "")


def _owners(orders: Mapping[Address, list[str]], silent: set[str]) -> dict[Address, str]:
    """Return the first candidate of each address that is not silent; if all are, the first."""
    return {
        address: next((it for it in order if it not in silent), order[0])
        for address, order in orders.items()
        if order
    }
