# SPDX-License-Identifier: Apache-2.0
"""TCP packets to a frontend that belong to no flow, and come and go by one device: from connections
through a router, and from lost connections.

With kube-proxy a connection that conntrack knows continues; any other is reset by the endpoint to
which it is DNATed in its middle (kube-proxy.md 12).
"""

import time

import pytest

from tests.packet.forwarding import PASSED, SECOND, TRIAL, became, grow_older, sent_on
from tests.packet.frames import TCP, at, ends, opening, reply, segment
from tests.packet.node import PacketNode, knows_ingress_device
from tests.packet.places import Places
from tests.packet.services import serve

pytestmark = pytest.mark.skipif(
    not knows_ingress_device(), reason="a test run cannot name the device where its packet came in"
)
EXPIRY = 600 * SECOND
REFUSED = ("redirect", {"refused": 1})  # to the neighbour on the route to the client
every_kind = pytest.mark.parametrize("kind", ["balancer", "external", "cluster"])


@pytest.fixture
def where(node: PacketNode, places: Places) -> str:
    return serve(node, places, "external", cluster=[at(places.there, 8080)])


@pytest.fixture
def client(places: Places) -> str:
    return at(places.client, 50123)


@every_kind
@pytest.mark.parametrize("flags", ["A", "PA", "FA", "SA"])
def test_a_packet_that_comes_back_is_reset(
    node: PacketNode, places: Places, client: str, kind: str, flags: str
) -> None:
    """A packet that comes back is reset, with the number that its sender expects."""
    where = serve(node, places, kind, cluster=[at(places.there, 8080)])
    request = segment(client, where, flags, payload=b"more" * 50)
    left = sent_on(node, request)
    assert became(left) == PASSED
    refused = sent_on(node, left.packet)
    assert became(refused) == REFUSED
    assert ends(refused.packet) == f"{where} > {client}"
    reset = refused.packet[TCP]
    assert (str(reset.flags), reset.seq, reset.ack) == ("R", 5001, 0)


def test_lost_without_loop(node: PacketNode, where: str, client: str) -> None:
    """If packets do not come back, the client is reset when it sends again after a while."""
    for _ in range(3):
        assert became(sent_on(node, segment(client, where, "PA", payload=b"x"))) == PASSED
    grow_older(node, TRIAL)
    for _ in range(3):
        assert became(sent_on(node, segment(client, where, "PA", payload=b"x"))) == REFUSED
    dropped = sent_on(node, segment(client, where, "R"))
    assert became(dropped) == ("drop", {"reject_limited": 1})


def test_a_connection_with_replies_continues(node: PacketNode, where: str, client: str) -> None:
    """A connection whose replies pass continues, however old it gets and whoever ends it."""
    asked = segment(client, where, "PA", payload=b"x")
    for flags in ("PA", "A", "FA", "R"):
        for age in (TRIAL, EXPIRY):
            assert became(sent_on(node, segment(client, where, flags))) == PASSED
            assert became(sent_on(node, reply(asked))) == PASSED
            grow_older(node, age)
            assert became(sent_on(node, asked)) == PASSED
    assert not node.flows()


def test_own_reset_is_no_reply(node: PacketNode, where: str, client: str) -> None:
    """The reset that refuses a client passes egress, and does not count as a reply."""
    sent_on(node, segment(client, where, "A"))
    grow_older(node, TRIAL)
    refused = sent_on(node, segment(client, where, "A"))
    assert became(node.egress(refused.packet)) == PASSED
    assert became(sent_on(node, segment(client, where, "A"))) == REFUSED


@pytest.mark.skipif(
    time.monotonic_ns() < TRIAL + EXPIRY, reason="the machine started less than ten minutes ago"
)
def test_client_port_again(node: PacketNode, where: str, client: str) -> None:
    """After ten minutes the tuple may belong to another connection, so the test is repeated."""
    sent_on(node, segment(client, where, "A"))
    grow_older(node, TRIAL)
    assert became(sent_on(node, segment(client, where, "A"))) == REFUSED
    grow_older(node, EXPIRY)
    assert became(sent_on(node, segment(client, where, "A"))) == PASSED


def test_other_packets_leave_no_note(
    node: PacketNode, places: Places, where: str, client: str
) -> None:
    """Packets that belong to a flow, are for no frontend, have SYN, or leave by another device
    leave no note.
    """
    unknown = segment(client, where, "A")
    for packet, into in (
        (unknown, "pods"),
        (segment(client, where, "S"), "uplink"),
        (segment(client, at(places.external, 9), "A"), "uplink"),
    ):
        assert node.egress(packet, into=into).verdicts == {"passed": 1}
    assert not dict(node.maps["forwarded"].items())
    node.through(opening("tcp", client, where))
    assert node.ingress(unknown).verdicts == {"established": 1}
