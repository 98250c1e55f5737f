# SPDX-License-Identifier: Apache-2.0
"""A packet whose socket a hook has translated is left alone if a Service claims its destination
(tests/network/test_translated_once.py).

The kernel gives each test run a socket of its own, with the next cookie of the CPU; the tests
remember all cookies that may come next.
"""

import os
import socket
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from ebpflb.kernel.maps.records import NO_FRONTEND, PeerFrontend, SocketEntry
from tests.packet.frames import at, host_of, opening, port_of
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve
from tests.packet.vips import REJECT, publish

SO_COOKIE = 57
VERDICT = "translated_at_socket"
AHEAD, BATCH = 200, 4096  # cookies that are remembered; of a processor at a time


@pytest.fixture
def one_processor() -> Iterator[None]:
    """Stay on one CPU, because another one has other cookies."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usual)})
    yield
    os.sched_setaffinity(0, usual)


def last_cookie() -> int:
    """Return the CPU's last cookie; its batch has space for the next ones."""
    while True:
        with socket.socket() as one:
            cookie = int.from_bytes(one.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), "little")
        if cookie % BATCH < BATCH - AHEAD:
            return cookie


def remember(node: PacketNode, to: str) -> None:
    """Remember future sockets as connected to a frontend at this address and port."""
    peer = PeerFrontend(NO_FRONTEND, 7, ip_address(host_of(to)), port_of(to))
    begin = last_cookie() + 1
    node.write("sockets", [(begin + n, SocketEntry(peer, 3)) for n in range(AHEAD)])
    node.put("sockets_full", 0, (0, 0, AHEAD))


@pytest.mark.usefixtures("one_processor")
@pytest.mark.parametrize("kind", ["external", "balancer", "nodeport"])
def test_an_external_frontend(node: PacketNode, places: Places, protocol: str, kind: str) -> None:
    """A pod's request passes; without the socket's entry it is translated."""
    where = serve(node, places, kind, protocol, cluster=[at(places.there, 8080)])
    request = opening(protocol, at(places.pod, 50123), where)
    remember(node, where)
    assert node.ingress(request, "pods") == ("pass", bytes(request), {VERDICT: 1})
    node.put("sockets_full", 0, (0, 0, 0))
    assert node.ingress(request, "pods").verdicts == {"translated": 1}


@pytest.mark.usefixtures("one_processor")
@pytest.mark.parametrize("kind", ["external", "balancer"])
def test_from_the_node(node: PacketNode, places: Places, protocol: str, kind: str) -> None:
    """The node's packet passes; if the frontend has no endpoint, other packets are refused."""
    where = serve(node, places, kind, protocol)
    request = opening(protocol, at(places.node, 50123), where)
    assert node.egress(request, into=None).verdicts == {"refused": 1}
    remember(node, where)
    assert node.egress(request, into=None) == ("pass", bytes(request), {VERDICT: 1})


@pytest.mark.usefixtures("one_processor")
def test_an_unknown_port(node: PacketNode, places: Places, protocol: str) -> None:
    """Only other packets are refused at a port that a load balancer's address does not serve."""
    node.settings("detect_local", *REJECT.split())
    where = at(publish(node, places, "balancer"), 81)
    request = opening(protocol, at(places.client, 50123), where)
    assert node.ingress(request).verdicts == {"refused": 1}
    remember(node, where)
    assert node.ingress(request) == ("pass", bytes(request), {"passed": 1})


@pytest.mark.usefixtures("one_processor")
def test_another_destination(node: PacketNode, places: Places, protocol: str) -> None:
    """The socket's entry for one endpoint does not apply to another one."""
    where = serve(node, places, "external", protocol, cluster=[at(places.there, 8080)])
    remember(node, at(places.elsewhere, 8080))
    request = opening(protocol, at(places.pod, 50123), where)
    assert node.ingress(request, "pods").verdicts == {"translated": 1}
