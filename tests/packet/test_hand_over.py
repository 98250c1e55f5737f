# SPDX-License-Identifier: Apache-2.0
"""Requests are handed to the node that has an endpoint, by its MAC address and with one hop less;
everything else goes on unchanged (bpf/path/hand_over.h).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest
from scapy.layers.inet import IPOption_NOP
from scapy.layers.l2 import Dot1Q

from ebpflb.kernel import bpf
from ebpflb.kernel.handing import AddressBits, HopEntry, bit_of
from ebpflb.kernel.maps.layout import HANDED
from ebpflb.kernel.programs import compiler
from ebpflb.kernel.programs.precompile import HAND_OVER
from ebpflb.model.addresses import Address
from ebpflb.plan.handing import THIS_NODE, HandedFrontend, HandedPlace
from tests.kit import once
from tests.packet import errors
from tests.packet.conftest import Loaded, loaded
from tests.packet.frames import (
    DEVICE,
    ICMP,
    IP,
    Ether,
    Packet,
    at,
    built,
    carrier,
    datagram,
    fragments,
    network,
    opening,
    reply,
    segment,
    with_hops,
)
from tests.packet.network import having
from tests.packet.node import Outcome, PacketNode
from tests.packet.places import Places
from tests.packet.services import ping as ping_of
from tests.publishing import frontend

TWO, THREE, UNTESTED = "02:00:00:00:00:32", "02:00:00:00:00:33", "02:00:00:00:00:34"
BOTH = 3  # families
SIZE = 8  # of a block


class Node(PacketNode):
    """A node that hands requests over to `two` and `three`."""

    def arrange(self, places: Places) -> None:
        self.where, self.client = at(places.balancer, 443), at(places.client, 50123)
        for protocol in ("tcp", "udp"):
            self.publish(1, {f"{self.where}/{protocol}": "external load_balancer local"})
        self.hop(TWO)
        self.hop(THREE)
        self.put("hops", UNTESTED, HopEntry(ip_address("::"), 0, THIS_NODE, 0))
        self.spread(1, TWO)

    def hop(self, mac: str, families: int = BOTH) -> None:
        entry = HopEntry(ip_address("192.0.2.2"), self.devices["uplink"], DEVICE, families)
        self.put("hops", mac, entry)

    def spread(self, block: int, *macs: str, by_client: bool = False) -> None:
        """Give the frontends a block with these nodes, in turns."""
        base = block * SIZE
        for number in range(SIZE if macs else 0):
            place = HandedPlace(macs[number % len(macs)], block)
            self.put("handed_places", base + number, place)
            self.put("handed_members", place, 1)
        entry = HandedFrontend(block, base, SIZE if macs else 0, by_client)
        for protocol in ("tcp", "udp"):
            self.put("handed_frontends", frontend(f"{self.where}/{protocol}"), entry)
        self.mark(frontend(f"{self.where}/tcp").address)

    def mark(self, *addresses: Address) -> None:
        """These are the addresses of frontends."""
        bits = AddressBits(self.maps["handed_addresses"])
        bits.flip(map(bit_of, addresses))

    def run(self, packet: Packet | bytes, device: str = "uplink") -> Outcome:
        return self._run("hand_over", bytes(packet), device, None, 0)

    def node_of(self, packet: Packet | bytes, device: str = "uplink") -> str:
        """The MAC address to which the packet is handed; "" if it goes on, unchanged."""
        frame = bytes(packet)
        done = self.run(frame, device)
        if done.action == "pass":
            assert done.frame == frame
            assert not done.verdicts
            return ""
        assert (done.action, done.verdicts) == ("redirect", {"handed": 1})
        mac: str = done.packet.dst
        sent = Ether(frame)
        hops = sent[IP].ttl if IP in sent else network(sent).hlim
        wanted = with_hops(sent, hops - 1)
        wanted.src, wanted.dst = DEVICE, mac
        assert bytes(wanted) == done.frame
        return mac

    def count(self, name: str) -> int:
        return self.maps[name].count()


@pytest.fixture(scope="module")
def program(shared: Path, cache: Path) -> Iterator[Loaded]:
    with once.alone(shared):
        compiled = compiler.compile_source(HAND_OVER, cache=cache)
    with loaded(compiled, **HANDED) as found:
        yield found


@pytest.fixture
def node(program: Loaded, devices: dict[str, int], places: Places) -> Node:
    made = Node(*program, devices)
    made.arrange(places)
    return made


def middle(node: Node, client: str | None = None) -> Packet:
    """A segment in the middle of the client's connection."""
    return segment(client or node.client, node.where, "A")


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_requests_are_handed_over(node: Node, protocol: str) -> None:
    """Those that open a flow, and all others, which nobody has to remember."""
    assert node.node_of(opening(protocol, node.client, node.where)) == TWO
    other = node.client.replace("50123", "50124")
    assert node.node_of(middle(node, other)) == TWO


def test_requests_with_options_are_handed_over(node: Node, places: Places) -> None:
    if places.version == 4:
        frame = carrier(places.client, places.balancer, options=IPOption_NOP())
        assert node.node_of(built(frame / middle(node)["TCP"])) == TWO


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_share_stays_here(node: Node, protocol: str) -> None:
    node.spread(2, THIS_NODE)
    for frame in (opening(protocol, node.client, node.where), middle(node)):
        assert node.node_of(frame) == ""


def test_what_is_never_handed_over(node: Node, places: Places) -> None:
    """Other frontends and protocols, frames of nodes, for others or for many, in VLANs."""
    asked = segment(node.client, node.where)
    others: list[Packet | bytes] = [
        segment(node.client, at(places.balancer, 444)),
        opening("sctp", node.client, node.where),
        *(_changed(asked, src=mac) for mac in (TWO, THREE, UNTESTED)),
        *(_changed(middle(node), src=mac) for mac in (TWO, UNTESTED)),
        *(_changed(asked, dst=mac) for mac in ("02:00:00:00:00:77", "ff:ff:ff:ff:ff:ff")),
        Ether(src=asked.src, dst=asked.dst) / Dot1Q(vlan=7) / network(asked),
        segment(at(places.pod, 50123), node.where),
        bytes(asked)[:-6],
    ]
    for frame in others:
        assert node.node_of(frame) == ""
    assert node.node_of(asked, "pods") == ""
    node.publish(1, {f"{node.where}/tcp": "external load_balancer local untracked"})
    assert node.node_of(asked) == ""


def _changed(frame: Packet, **fields: str) -> Packet:
    changed = frame.copy()
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def test_the_last_hop_is_left_to_the_stack(node: Node) -> None:
    assert node.node_of(with_hops(segment(node.client, node.where), 1)) == ""
    assert node.node_of(with_hops(segment(node.client, node.where), 2)) == TWO


@pytest.mark.parametrize("number", [1, 2])
def test_a_connection_keeps_its_node(node: Node, number: int) -> None:
    """From its first packet on, whatever the nodes are; a new one with the same ports does not."""
    frames = [segment(node.client, node.where), middle(node)]
    for frame in frames[:number]:
        assert node.node_of(frame) == TWO
    node.spread(2, THREE)
    for _ in range(2):
        assert node.node_of(middle(node)) == TWO
    node.spread(3, THIS_NODE)
    assert node.node_of(middle(node)) == TWO
    assert node.node_of(segment(node.client, node.where)) == ""
    assert node.node_of(middle(node)) == ""


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_flow_that_stayed_here_stays(node: Node, protocol: str) -> None:
    """Datagrams only as long as this node has endpoints, or no other one is believed."""
    ask = middle(node) if protocol == "tcp" else datagram(node.client, node.where)
    node.spread(9)
    assert node.node_of(opening(protocol, node.client, node.where)) == node.node_of(ask) == ""
    node.spread(2, *[TWO] * 7, THIS_NODE)
    assert node.node_of(ask) == ""
    node.spread(3, TWO)
    assert node.node_of(ask) == ("" if protocol == "tcp" else TWO)


def test_datagrams_follow_the_endpoints(node: Node) -> None:
    ask = datagram(node.client, node.where)
    assert node.node_of(ask) == TWO
    node.spread(2, *[THREE] * 7, TWO)
    assert node.node_of(ask) == TWO
    node.spread(3, THREE)
    assert node.node_of(ask) == THREE


def test_nothing_is_handed_to_a_node_that_is_not_believed(node: Node, places: Places) -> None:
    """Its flows get another one, if there is another; one family does not stand for the other."""
    assert node.node_of(middle(node)) == TWO
    node.hop(TWO, families=0)
    assert node.node_of(middle(node)) == ""
    node.hop(TWO, families=2 if places.version == 4 else 1)
    assert node.node_of(middle(node)) == ""
    node.spread(2, THREE)
    assert node.node_of(middle(node)) == THREE


def test_source_ranges_are_checked_before(node: Node, places: Places) -> None:
    """A client that is not admitted goes on to where it is dropped; a known flow goes on."""
    assert node.node_of(middle(node)) == TWO
    words = "external load_balancer local restricted"
    node.publish(1, {f"{node.where}/tcp": words, f"{node.where}/udp": words})
    stranger = at(places.other_client, 50123)
    for client, wanted in ((stranger, ""), (at(places.client, 50124), "")):
        assert node.node_of(segment(client, node.where)) == wanted
        assert node.node_of(datagram(client, node.where)) == wanted
    assert node.node_of(middle(node)) == TWO
    node.admit(1, places.clients)
    assert node.node_of(segment(at(places.client, 50124), node.where)) == TWO
    assert node.node_of(segment(stranger, node.where)) == ""


def test_answers_to_a_pod_stay_its_own(node: Node, places: Places) -> None:
    """Whoever claims its address and port, which may be in no podCIDR: an address is a pod's if its
    route leads past the segment, or to another node.
    """
    frames = [
        segment(node.client, node.where, "SA"),
        middle(node),
        datagram(node.client, node.where),
        errors.error("too big", places.router, reply(segment(node.client, node.where))),
    ]
    node_two = "neighbour", places.other_node, "lladdr", TWO, "dev", "uplink"
    for way in (["dev", "pods"], ["via", places.other_node]):
        with having(*node_two), having("route", places.balancer, *way):
            assert {node.node_of(frame) for frame in frames} == {""}
    for way in (["via", places.router], ["dev", "uplink"]):
        with having("route", places.balancer, *way):
            node.spread(2, TWO)
            other = at(places.client, 50124 + len(way[0]))
            assert node.node_of(segment(other, node.where)) == TWO


def test_a_place_of_another_block_is_not_believed(node: Node) -> None:
    for number in range(SIZE):
        node.put("handed_places", SIZE + number, HandedPlace(THREE, 9))
    assert node.node_of(middle(node)) == ""


def test_fragments_follow_the_first(node: Node) -> None:
    first, *later = fragments(node.client, node.where)
    assert {node.node_of(piece) for piece in later} == {""}
    assert {node.node_of(piece) for piece in (first, *later)} == {TWO}
    assert node.node_of(_changed(later[0], src=THREE)) == ""
    followed = node.maps["handed_fragments"]
    ((key, value),) = followed.packed_items()
    bpf.map_update(followed.fd, key, value[:8] + bytes(8))  # long ago
    assert node.node_of(later[0]) == ""
    node.spread(2, THIS_NODE)  # the same id again
    assert {node.node_of(piece) for piece in (first, *later)} == {""}


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_an_error_follows_the_flow_that_it_quotes(
    node: Node, places: Places, protocol: str
) -> None:
    ask = middle(node) if protocol == "tcp" else datagram(node.client, node.where)
    about = reply(opening(protocol, node.client, node.where))
    node.spread(2, THREE)
    assert node.node_of(errors.error("too big", places.router, about)) == THREE  # by the hash
    assert node.count("handed_connections") + node.count("handed_datagrams") == 0
    assert node.node_of(ask) == THREE
    node.spread(3, TWO, THREE)
    assert node.node_of(errors.error("too big", places.router, about)) == THREE
    node.mark(*map(ip_address, (places.balancer, places.external)))
    forged = errors.error("too big", places.router, about, to=places.external)
    other = errors.error(
        "too big", places.router, reply(segment(node.client, at(places.other_node, 1)))
    )
    assert node.node_of(forged) == node.node_of(other) == ""


def test_pings_go_to_a_node_with_endpoints(node: Node, places: Places) -> None:
    """If the address as a whole is served, which two options ask for."""
    asked = _from(ping_of(places, places.balancer, 8), places.client)
    assert node.node_of(asked) == ""
    whole = frontend(at(places.balancer, 0) + "/icmp")
    node.publish(1, {at(places.balancer, 0) + "/icmp": "external load_balancer local"})
    node.put("handed_frontends", whole, HandedFrontend(1, SIZE, SIZE, 0))
    assert node.node_of(asked) == TWO
    node.has(places.balancer)  # somebody claims an address of this node
    assert node.node_of(asked) == ""
    if places.version == 4:
        answer = built(carrier(places.client, places.balancer) / ICMP(type=0))
        assert node.node_of(answer) == ""


def _from(frame: Packet, source: str) -> Packet:
    changed = frame.copy()
    network(changed).src = source
    for layer in changed.iterpayloads():
        for name in ("chksum", "cksum"):
            if name in layer.fields:
                delattr(layer, name)
    return built(changed)


def test_every_node_draws_alike(node: Node, places: Places) -> None:
    """So a connection goes on that comes in by another node from now on; ports are spread evenly,
    and with session affinity a client has one node.
    """
    node.spread(2, TWO, THREE)
    clients = [at(places.client, 40000 + number) for number in range(200)]
    drawn = {client: node.node_of(segment(client, node.where)) for client in clients}
    assert all(70 < its < 130 for its in Counter(drawn.values()).values())
    with _emptied(node):
        node.put("secret", 0, 4711)
        assert {it: node.node_of(middle(node, it)) for it in clients} == drawn
    node.spread(3, TWO, THREE, by_client=True)
    with _emptied(node):
        assert len({node.node_of(segment(client, node.where)) for client in clients}) == 1


@contextmanager
def _emptied(node: Node) -> Iterator[None]:
    for name in ("handed_openings", "handed_connections", "handed_datagrams"):
        table = node.maps[name]
        table.delete([table.key.unpack(key) for key, _ in table.packed_items()])
    yield


def test_what_another_flow_has_left_is_not_believed(node: Node, places: Places) -> None:
    """An element may become another flow's while it is read."""
    other = at(places.client, 50124)
    assert node.node_of(middle(node)) == TWO
    node.spread(2, THREE)
    assert node.node_of(middle(node, other)) == THREE
    node.exchange("handed_connections")
    assert node.node_of(middle(node, other)) == THREE


def test_no_flood_forgets_a_connection(node: Node) -> None:
    """Of openings, or of datagrams; from the second packet on."""
    for frame in (segment(node.client, node.where), middle(node)):
        assert node.node_of(frame) == TWO
    for number in range(20):
        client = node.client.replace("50123", f"{number + 1}")
        node.node_of(segment(client, node.where))
        node.node_of(datagram(client, node.where))
    names = "connections", "openings", "datagrams"
    assert [node.count(f"handed_{it}") for it in names] == [1, 21, 20]
