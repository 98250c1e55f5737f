# SPDX-License-Identifier: Apache-2.0
"""Which nodes requests may be handed to: agents on one segment, simulated, with their own clock.

Real are the threads' turns; the segment, and what the programs answer, are simulated.
"""

from collections.abc import Iterator
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any

import pytest

from ebpflb.agent.hand_over_test import EVERY, INTERVAL, HandOverTest, View
from ebpflb.agent.loop import Call, Inbox, Turn
from ebpflb.kernel.node.routes import Route
from ebpflb.kernel.segment import Answer, LegAnswer
from ebpflb.model.addresses import Address, Family
from ebpflb.model.annotations import HAND_OVER_AUTO
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.devices import Device
from ebpflb.model.events import Changed, Key, Kind, ReadObject, Replaced
from ebpflb.model.hand_over import Hops
from ebpflb.model.pools import parse_pools
from ebpflb.model.services import Admission
from tests.model import builders

ROUTER, GATEWAY = ip_address("192.0.2.1"), b"\x06\0\0\0\0\x01"
ADDRESSES = {
    Family.IPV4: ip_address("192.0.2.200"),
    Family.IPV6: ip_address("2001:db8::200"),
}
OWN = {Family.IPV4: ip_address("192.0.2.11"), Family.IPV6: ip_address("2001:db8::11")}
WEB = Key("shop", "web")
HOSTILE = builders.service(  # as the router
    type="LoadBalancer", ingress=[{"ip": "192.0.2.1"}], externalTrafficPolicy="Local"
)
UPLINK = Device(2, "eth0", False, True, 0, tuple(OWN.values()), (), mac="02:00:00:00:00:01")


BUFFER = 100  # frames that wait at most: of a real socket some 1,000


class Neighbour:
    """Another node; what its side of the network drops can be set."""

    def __init__(self, number: int) -> None:
        self.v4, self.v6 = (ip_address(f"{net}{number}") for net in ("192.0.2.1", "2001:db8::1"))
        self.mac = bytes([2, 0, 0, 0, 0, number])
        self.is_up = self.has_program = True
        self.may_send_any = True  # from others' addresses


class World:
    """This node's thread, the neighbours two and three, and the segment between them."""

    def __init__(self, *former: tuple[Family, str]) -> None:
        self.now, self.waiting = 0.0, list[Any]()
        self.nodes = {"two": Neighbour(2), "three": Neighbour(3)}
        self.routes: dict[Address, Route] = {}
        self.proxied: set[Address] = set()  # for which the router answers
        self.may_send_any, self.sent = True, 0
        self.error: OSError | None = None
        self.mac, self.device = bytes([2, 0, 0, 0, 0, 1]), UPLINK
        here: Any = self
        legs: Any = SimpleNamespace(ask=self.ask_leg, take=self.take, close=self.close)
        self.test = HandOverTest(
            here,
            here,
            here,
            asked=True,
            former=former,
            route_to=lambda it: self.routes.get(it, Route(UPLINK.index, "eth0")),
            routers=lambda: {ROUTER},
            open_segment=self.open,
            open_test=lambda _: legs,
            wait=lambda _: False,
            clock=lambda: self.now,
        )
        self.show()

    def show(self, uplinks: dict[int, Device] | None = None) -> None:
        """Let the loop see Nodes and devices as they are now."""
        known = {name: (it.v4, it.v6) for name, it in self.nodes.items()}
        self.test.view = View(known, OWN, {2: UPLINK} if uplinks is None else uplinks, ADDRESSES)
        self.test.is_new = False

    def open(self, _: Device) -> Any:
        if self.error:
            raise self.error
        return self

    def put(self, call: Any) -> None:
        call.answer()

    def close(self) -> None:
        pass

    def take(self) -> Iterator[Any]:
        found, self.waiting = self.waiting[:BUFFER], []
        yield from found

    def ask(self, address: Address, mac: bytes = b"") -> None:
        for each in self.nodes.values():
            if each.is_up and address in (each.v4, each.v6) and mac in (b"", each.mac):
                self.waiting.append(Answer(address, each.mac))
        if address == ROUTER or address in self.proxied:
            self.waiting.append(Answer(address, GATEWAY))

    def ask_leg(self, mac: bytes, source: Address, destination: Address, mark: bytes) -> None:
        self.sent += 1
        for each in self.nodes.values():
            passes = self.may_send_any or source in OWN.values()
            answers = each.may_send_any or destination in (each.v4, each.v6)
            if each.mac == mac and each.is_up and each.has_program and passes and answers:
                self.waiting.append(LegAnswer(mac, mark))

    def pass_time(self, seconds: float = 0.0) -> None:
        """Let this time pass, at least one turn."""
        until = self.now + seconds
        while True:
            self.test.turn()
            if self.now >= until:
                return
            self.now += INTERVAL

    @property
    def hops(self) -> Hops:
        assert self.test.hops
        return self.test.hops

    @property
    def believed(self) -> set[tuple[str, int]]:
        return {(hop.node, hop.address.version) for hop in self.hops.believed}

    @property
    def conditions(self) -> dict[str, str]:
        return dict(self.test.status()["hand_over_blocked"])


ALL = {("two", 4), ("two", 6), ("three", 4), ("three", 6)}
ONLY_TWO = {("two", 4), ("two", 6)}


@pytest.fixture
def world() -> World:
    return World()


def test_nodes_are_believed_after_a_test_and_tested_every_minute(world: World) -> None:
    """Both families; with few frames."""
    assert world.test.hops is None
    world.pass_time()
    assert world.believed == ALL and not world.hops.blocked
    assert world.hops.macs == {it.mac for it in world.nodes.values()}
    world.pass_time(EVERY - 1)
    first = world.sent
    world.pass_time(2)
    assert first == len(ALL) * 3 and world.sent == 2 * first
    assert world.test.status()["hand_over"] == "to 2 of 2 other nodes"


def test_many_nodes_are_tested_in_turns(world: World) -> None:
    """Or some of their answers would be lost, every minute."""
    world.nodes |= {f"node-{number}": Neighbour(number) for number in range(4, 100)}
    world.show()
    world.pass_time()
    assert len(world.believed) == 2 * len(world.nodes)


@pytest.mark.parametrize("ours", [True, False])
def test_a_network_that_drops_others_addresses(world: World, ours: bool) -> None:
    """At this node's port, or at the other's: named, and a condition. Found later too, and once
    it is allowed again the node is believed again.
    """
    world.pass_time()
    if ours:
        world.may_send_any = False
    else:
        world.nodes["three"].may_send_any = False
    world.pass_time(EVERY + 20)
    assert world.believed == (set() if ours else ONLY_TWO)
    said = "gets nothing that this node sends" if ours else "packets of 2001:db8::200: the network"
    assert said in world.hops.blocked["three"]
    assert world.conditions.keys() == ({"two", "three"} if ours else {"three"})
    world.may_send_any = world.nodes["three"].may_send_any = True
    world.pass_time(12)
    assert world.believed == ALL and not world.conditions


def test_a_lost_test_is_repeated_before_it_counts(world: World) -> None:
    world.pass_time(EVERY - 1)
    world.nodes["three"].is_up = False
    world.pass_time(8)
    assert world.believed == ALL
    world.nodes["three"].is_up = True
    world.pass_time(EVERY)
    assert world.believed == ALL


def test_a_new_agent_believes_as_the_former_one() -> None:
    """Until three tests have failed: on a busy node the first may be lost."""
    world = World((Family.IPV4, "02:00:00:00:00:03"))
    world.nodes["three"].has_program = False
    world.pass_time()
    assert world.believed == ONLY_TWO | {("three", 4)}
    world.pass_time(12)
    assert world.believed == ONLY_TWO


def test_a_node_that_is_silent_is_no_condition(world: World) -> None:
    """An agent of an older version, or a dead node: it may come later."""
    world.nodes["two"].has_program = False
    world.nodes["three"].is_up = False
    world.pass_time()
    assert not world.believed and not world.conditions
    assert "older" in world.hops.blocked["two"]
    assert "is down" in world.hops.blocked["three"]
    world.nodes["two"].has_program = world.nodes["three"].is_up = True
    world.pass_time(12)
    assert world.believed == ALL


def test_a_station_that_is_a_router_is_never_tested(world: World) -> None:
    """By its MAC address (proxy ARP), or because it answers for several nodes."""
    world.proxied = {world.nodes["three"].v4, world.nodes["three"].v6}
    world.nodes["three"].is_up = False
    world.pass_time()
    assert world.believed == ONLY_TWO and "a router (06:00" in world.conditions["three"]
    assert GATEWAY not in world.hops.macs
    world.nodes["two"].mac = world.nodes["three"].mac
    world.nodes["three"].is_up, world.proxied = True, set()
    world.pass_time(EVERY + 20)
    assert not world.believed and "a router (02:00" in world.conditions["two"]


def test_nodes_on_other_segments(world: World) -> None:
    """Behind a router, as all are with a /32; at a device that is no uplink; without a route."""
    two, three = world.nodes.values()
    world.routes = {
        two.v4: Route(2, "eth0", gateway=ROUTER),
        two.v6: Route(9, "wg0"),
        three.v4: Route(0, why="network is unreachable"),
    }
    world.pass_time()
    assert world.believed == {("three", 6)} and not world.conditions
    assert "not at an uplink: wg0" in world.hops.blocked["two"]
    assert "unreachable" in world.hops.blocked["three"]


def test_another_mac_address_is_tested_first(world: World) -> None:
    """A network card was replaced. Nodes that go are forgotten, also without uplinks."""
    world.pass_time()
    world.nodes["three"].mac = bytes([2, 0, 0, 0, 0, 9])
    world.nodes["three"].has_program = False
    world.pass_time(EVERY)
    assert world.believed == ONLY_TWO
    del world.nodes["two"]
    world.show()
    world.pass_time()
    assert not world.believed and world.hops.macs == {world.nodes["three"].mac}
    world.show(uplinks={})
    world.pass_time()
    assert "not at an uplink" in world.hops.blocked["three"]


def test_an_agent_that_may_not_test_believes_nobody(world: World) -> None:
    """Without CAP_NET_RAW; what it has found before does not count either."""
    world.pass_time()
    world.error = PermissionError(1, "Operation not permitted")
    with pytest.raises(PermissionError):
        world.pass_time(EVERY)
    assert not world.believed and "needs CAP_NET_RAW" in world.conditions["two"]
    world.error = None
    world.pass_time()
    assert world.believed == ALL


@pytest.mark.parametrize("pool", [None, "192.0.2.240-192.0.2.250"])
def test_no_service_chooses_the_address_of_tests(world: World, pool: str | None) -> None:
    """Only the operator does, by his pools: a switch may close the ports of those who send from the
    router's address, and a firewall drop some. So a Service's change costs tests nothing.
    """
    pools = parse_pools([pool] if pool else [])
    cluster = ClusterState("one", admission=Admission(pools=pools, hand_over=HAND_OVER_AUTO))
    inbox, devices = Inbox(), SimpleNamespace(devices=(UPLINK,))
    node_sync: Any = SimpleNamespace(device_list=devices)
    test = HandOverTest(cluster, node_sync, inbox, asked=False, clock=lambda: world.now)
    for kind in (Kind.SERVICE, Kind.ENDPOINT_SLICE, Kind.NODE):
        cluster.apply(Replaced(kind, {}))
    test.turn()
    event, turn = Changed(Kind.SERVICE, WEB, ReadObject(HOSTILE, "")), Turn(serves=True)
    turn.applied.append((event, cluster.apply(event)))
    for message in inbox.waiting(0):
        assert isinstance(message, Call)
        message.answer()
    assert test.view and not test.is_new
    test.observe(Turn(serves=True))
    test.is_new = False
    test.observe(turn)
    assert not test.is_new
    tested = str(test.view.addresses[Family.IPV4])
    assert tested == ("192.0.2.240" if pool else "198.18.235.2")
