# SPDX-License-Identifier: Apache-2.0
"""Direct connections to an endpoint from a client port that also has a connection through a
frontend.
"""

import pytest

from tests.packet.errors import error
from tests.packet.frames import (
    Ether,
    Packet,
    at,
    ends,
    next_packet,
    opening,
    quoted,
    reply,
    segment,
    source,
    to_another_host,
)
from tests.packet.node import PacketNode
from tests.packet.places import V4, V6, Places
from tests.packet.services import serve


@pytest.fixture
def client(places: Places) -> str:
    return at(places.pod, 50123)


@pytest.fixture
def backend(places: Places) -> str:
    return at(places.there, 8080)


@pytest.fixture
def where(node: PacketNode, places: Places, client: str, backend: str) -> str:
    """Return a cluster IP through which the client is connected to the backend."""
    found = serve(node, places, "cluster", cluster=[backend])
    shaken = node.through(segment(client, found), "pods", "uplink")
    node.through(reply(shaken), "uplink", "pods")
    return found


def direct(node: PacketNode, client: str, backend: str, flags: str = "S") -> Packet:
    return node.through(segment(client, backend, flags), "pods", "uplink")


@pytest.mark.parametrize("is_bridged", [False, True], ids=["routed", "bridged"])
def test_another_port(
    node: PacketNode, places: Places, protocol: str, client: str, *, is_bridged: bool
) -> None:
    """A direct connection gets its own port, even if its first packet is repeated, and both
    connections get replies; also if a bridge passes the direct packets on.
    """
    node.device("pods", V4.bridge, V6.bridge, *(["bridged"] if is_bridged else []))
    backend = at(places.there, 8080)
    where = serve(node, places, "cluster", protocol, cluster=[backend])
    through = node.through(opening(protocol, client, where), "pods", "uplink")
    node.through(reply(through), "uplink", "pods")

    def sent(frame: Packet | bytes) -> Packet:
        packet = Ether(bytes(frame))
        return node.through(to_another_host(packet) if is_bridged else packet, "pods", "uplink")

    asked = sent(opening(protocol, client, backend))
    assert source(asked) != client
    assert ends(sent(opening(protocol, client, backend))) == ends(asked)
    assert ends(node.through(reply(asked), "uplink", "pods")) == f"{backend} > {client}"
    assert ends(sent(next_packet(protocol, client, backend))) == ends(asked)
    known = node.through(Ether(next_packet(protocol, client, where)), "pods", "uplink")
    assert ends(node.through(reply(known, "A"), "uplink", "pods")) == f"{where} > {client}"


def test_what_a_port_has_translated(
    node: PacketNode, places: Places, protocol: str, client: str
) -> None:
    """A bridge whose port has got programs since then leaves a request as the port's translated it:
    it looks like one to the backend itself.
    """
    backend = at(places.there, 8080)
    where = serve(node, places, "cluster", protocol, cluster=[backend])
    node.through(opening(protocol, client, where), "pods", "uplink")
    node.device("pods", V4.bridge, V6.bridge, "master")
    between = opening(protocol, client, backend)
    assert node.ingress(between, "pods").frame == bytes(between)


def test_after_the_connection_has_ended(
    node: PacketNode, client: str, backend: str, where: str
) -> None:
    """A direct connection that a bridge passes on gets its replies, not those of a frontend's
    closed connection.
    """
    node.device("pods", V4.bridge, V6.bridge, "bridged")
    for flags in ("A", "FA"):
        node.through(segment(client, where, flags), "pods", "uplink")
    node.through(segment(backend, client, "FA", seq=5001, ack=1002), "uplink", "pods")
    asked = node.through(to_another_host(segment(client, backend)), "pods", "uplink")
    assert ends(asked) == f"{client} > {backend}"
    assert ends(node.through(reply(asked), "uplink", "pods")) == f"{backend} > {client}"


def test_an_error_is_translated_once(
    node: PacketNode, places: Places, client: str, backend: str, where: str
) -> None:
    """An ICMP error about the direct connection is translated at the client's own device, and not
    again at its bridge.
    """
    asked = direct(node, client, backend)
    about = error("too big", places.router, asked)
    assert node.egress(about, "tunnel", "uplink") == ("pass", bytes(about), {"passed": 1})
    left = node.egress(about, "pods", "uplink")
    assert left.verdicts == {"related": 1}
    assert quoted(left.packet) == f"{client} > {backend}"
