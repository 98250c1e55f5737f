# SPDX-License-Identifier: Apache-2.0
"""With --reply-path=request-device replies leave by the device where their requests came in.

In these tests a rule for the backend's address routes its packets to another device.
"""

import pytest

from tests.packet import wire
from tests.packet.errors import about, error
from tests.packet.frames import (
    IP,
    Packet,
    at,
    built,
    datagram,
    destination,
    ends,
    forwarded,
    host_of,
    network,
    opening,
    quoted,
    reply,
    source,
    with_hops,
)
from tests.packet.network import mtu, routed_from
from tests.packet.node import Outcome, PacketNode
from tests.packet.places import IPV4, Places
from tests.packet.services import exchange, serve

ON = ("detect_local", "reply_to_device")


def hops(packet: Packet) -> int:
    header = network(packet)
    count: int = header.ttl if IP in packet else header.hlim
    return count


def answer(node: PacketNode, places: Places, protocol: str, client: str = "") -> Packet:
    """Return the reply of a backend in a pod of this node to a client outside."""
    backend = [at(places.here, 8080)]
    where = serve(node, places, "nodeport", protocol, cluster=backend, here=backend)
    sender = at(client or places.client, 50123)
    return reply(node.through(opening(protocol, sender, where), "uplink", "pods"))


def left_alone(outcome: Outcome, packet: Packet) -> bool:
    return (outcome.action, outcome.frame) == ("pass", bytes(packet))


def test_reply_is_redirected(node: PacketNode, places: Places, protocol: str) -> None:
    """The reply leaves as if it had passed egress, with one hop fewer and every checksum
    correct.
    """
    node.settings(*ON)
    packet = answer(node, places, protocol)
    with routed_from(places.here, "tunnel"):
        came = node.ingress(packet, "pods")
    assert (came.action, came.verdicts) == ("redirect", {"established": 1})
    usual = node.egress(forwarded(packet), "uplink", "pods")
    assert bytes(network(came.packet)) == bytes(network(usual.packet))
    assert hops(came.packet) == hops(packet) - 1


def test_masqueraded_reply_is_redirected(node: PacketNode, places: Places, protocol: str) -> None:
    """A reply from a backend on another node needs both translations at once."""
    node.settings(*ON)
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    client = at(places.other_client, 50123)
    request = node.through(opening(protocol, client, where), "tunnel", "uplink")
    assert host_of(source(request)) == places.node
    with routed_from(places.there, "pods"):
        came = node.ingress(reply(request))
    assert came.action == "redirect"
    assert ends(came.packet) == f"{where} > {client}"


def test_route_to_that_device(node: PacketNode, places: Places, protocol: str) -> None:
    """If the routes lead the reply to the request's device, it passes netfilter, as without the
    option.
    """
    node.settings(*ON)
    packet = answer(node, places, protocol)
    assert left_alone(node.ingress(packet, "pods"), packet)


def test_route_to_that_device_without_a_neighbour(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """A reply also passes netfilter if the client is on the device's own network with an unknown
    MAC address.
    """
    node.settings(*ON)
    packet = answer(node, places, protocol, f"{places.node[:-1]}9")
    assert left_alone(node.ingress(packet, "pods"), packet)


def test_one_device(node: PacketNode, places: Places, protocol: str) -> None:
    """If client and backend are reached through one device, the stack forwards as before."""
    node.settings(*ON)
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    exchange(node, protocol, at(places.client, 50123), where)


def test_without_the_option(node: PacketNode, places: Places, protocol: str) -> None:
    """Without the option the reply follows the routes, and is translated where it leaves."""
    packet = answer(node, places, protocol)
    with routed_from(places.here, "tunnel"):
        assert left_alone(node.ingress(packet, "pods"), packet)


@pytest.mark.parametrize("count", [0, 1])
def test_last_hop(node: PacketNode, places: Places, protocol: str, count: int) -> None:
    """A reply whose last hop is used up is left to the stack, which informs the backend."""
    node.settings(*ON)
    packet = with_hops(answer(node, places, protocol), count)
    with routed_from(places.here, "tunnel"):
        assert left_alone(node.ingress(packet, "pods"), packet)


def with_dont_fragment(packet: Packet) -> Packet:
    copy = packet.copy()
    if IP in copy:
        copy[IP].flags = "DF"
        del copy[IP].chksum
    return built(copy)


def test_too_long(node: PacketNode, places: Places) -> None:
    """The sender of a reply longer than the device takes is told how long it may be (RFC 1191).

    Kernels before 5.12 do not report the MTU, so programs then report 1,280.
    """
    node.settings(*ON)
    short = answer(node, places, "udp")
    long = with_dont_fragment(datagram(source(short), destination(short), bytes(1400)))
    with routed_from(places.here, "tunnel"), mtu("uplink", 1280):
        told = node.ingress(long, "pods")
        assert (told.action, told.verdicts) == ("redirect", {"too_long": 1})
        assert quoted(told.packet) == ends(long)
        assert about(told.packet) == about(error("too big", places.client, long))
        assert network(told.packet).dst == places.here
        assert not wire.faults(told.frame)
        assert node.ingress(short, "pods").action == "redirect"
    with routed_from(places.here, "tunnel"):
        assert node.ingress(long, "pods").verdicts == {"established": 1}


@IPV4
def test_may_be_fragmented(node: PacketNode, places: Places) -> None:
    """A too long reply that may be fragmented is left to the stack, which fragments it."""
    node.settings(*ON)
    short = answer(node, places, "udp")
    long = datagram(source(short), destination(short), bytes(1400))
    with routed_from(places.here, "tunnel"), mtu("uplink", 1280):
        assert left_alone(node.ingress(long, "pods"), long)


@pytest.mark.parametrize("sender", ["here", "remote_pod"])
def test_an_error_of_the_backend_is_redirected(
    node: PacketNode, places: Places, protocol: str, sender: str
) -> None:
    """The backend's error about a request is redirected, and comes from the frontend."""
    node.settings(*ON)
    asked = reply(answer(node, places, protocol))
    icmp = error("unreachable", getattr(places, sender), asked)
    with routed_from(getattr(places, sender), "tunnel"):
        came = node.ingress(icmp, "pods")
    assert (came.action, came.verdicts) == ("redirect", {"related": 1})
    usual = node.egress(forwarded(icmp), "uplink", "pods")
    assert bytes(network(came.packet)) == bytes(network(usual.packet))
    assert left_alone(node.ingress(icmp, "pods"), icmp), "where the routes lead it there"


def test_other_traffic(node: PacketNode, places: Places, protocol: str) -> None:
    """The backend's own traffic follows the routes."""
    node.settings(*ON)
    answer(node, places, protocol)
    packet = opening(protocol, at(places.here, 8080), at(places.other_client, 50123))
    with routed_from(places.here, "tunnel"):
        assert left_alone(node.ingress(packet, "pods"), packet)
