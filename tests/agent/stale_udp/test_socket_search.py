# SPDX-License-Identifier: Apache-2.0
"""Which entries of the map of sockets are stale, and which backends serve a frontend."""

from ipaddress import ip_address

import pytest

from ebpflb.agent.stale_udp import socket_search
from ebpflb.agent.stale_udp.lookups import ServedFrontends
from ebpflb.entries.services import Backend, Frontend
from ebpflb.kernel.maps.records import Peer, PeerFrontend, SocketEntry
from tests.agent.stale_udp.world import ELSEWHERE, HERE, OLD, SERVICE, UDP, VIP, World
from tests.kernel.variants import needs_root

pytestmark = needs_root

NODEPORT = Frontend(ip_address("0.0.0.0"), 30053, UDP)
NODEPORT6 = NODEPORT._replace(address=ip_address("::"))
FRONTENDS = [
    (VIP, VIP, True),
    (VIP, VIP._replace(port=54), False),
    (NODEPORT, NODEPORT._replace(address=ip_address("192.0.2.1")), True),
    (NODEPORT, NODEPORT._replace(address=ip_address("192.0.2.2")), False),
    (NODEPORT, NODEPORT._replace(address=ip_address("127.0.0.1")), True),
    (NODEPORT6, NODEPORT6._replace(address=ip_address("fd00::1")), True),
    (NODEPORT6, NODEPORT._replace(address=ip_address("192.0.2.1")), False),
]


@pytest.mark.parametrize(("served", "asked", "is_served"), FRONTENDS, ids=str)
def test_frontends(world: World, served: Frontend, asked: Frontend, is_served: bool) -> None:
    """A socket's frontend is found as the datapath does, NodePorts included; one without a service
    has no backends, so its sockets are stale.
    """
    world.maps["services"].delete([VIP])
    world.maps["node_addresses"].write([(ip_address(a), 1) for a in ("192.0.2.1", "fd00::1")])
    world.serve(Backend(HERE, world.port, frozenset({"cluster"}), OLD, SERVICE), frontend=served)
    asking = world.given._replace(frontend=asked)
    assert ServedFrontends(world.maps).is_stale(asking) != is_served
    world.serve(frontend=served)
    assert ServedFrontends(world.maps).is_stale(asking)


def test_torn(world: World) -> None:
    """If a slot belongs to another service by now, the socket counts as served."""
    world.maps["slots"].write([(0, ELSEWHERE._replace(service=SERVICE + 1))])
    assert not ServedFrontends(world.maps).is_stale(world.given)


def test_many(world: World) -> None:
    """All stale ones are found in a large map, and no stream sockets among them."""
    peers = [Peer(number, HERE, world.port) for number in range(1, 300)]
    stream = PeerFrontend(VIP._replace(protocol=6), OLD, HERE, world.port)
    known = (world.given, world.given, stream)
    entries = [(peer.socket, known[peer.socket % 3]) for peer in peers]
    world.maps["sockets"].write([(socket, SocketEntry(of, SERVICE)) for socket, of in entries])
    other = Peer(1000, HERE, world.port)
    world.maps["peers"].write([(other, world.given)])
    found = socket_search.stale_sockets(world.maps)
    assert found.keys() == {other, *(peer for peer in peers if known[peer.socket % 3] != stream)}
