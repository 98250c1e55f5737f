# SPDX-License-Identifier: Apache-2.0
"""Which backend a flow gets without a rotation, and with one.

Without one it is a fixed function of the flow's tuple and of this node's secret.
"""

import pytest

from tests.packet.frames import at, destination, opening
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve

PORTS = range(50_000, 50_064)
BACKENDS = 8
TURNS = 5  # backends of the rotation


def drawn(node: PacketNode, places: Places, secret: int) -> list[str]:
    """The backend of each source port of a client; no flow remembers an earlier one."""
    backends = [at(places.there, 8000 + number) for number in range(BACKENDS)]
    where = serve(node, places, "nodeport", "udp", cluster=backends)
    node.put("secret", 0, secret)
    packets = [opening("udp", at(places.client, port), where) for port in PORTS]
    found = [destination(node.ingress(packet).packet) for packet in packets]
    flows = node.maps["other_flows"]
    flows.delete([key for key, _ in flows.items()])
    return found


def test_no_client_can_choose_its_backend_by_its_port(node: PacketNode, places: Places) -> None:
    """Another secret draws other backends for the same ports, and spreads them as evenly."""
    one, other = (drawn(node, places, secret) for secret in (1, 0x1234_5678_9ABC_DEF1))
    agreeing = sum(a == b for a, b in zip(one, other, strict=True))
    assert agreeing < len(PORTS) // 2  # 8 of 64 by chance
    assert len(set(one)) == len(set(other)) == BACKENDS


def test_two_packets_of_a_flow_get_the_same_backend(node: PacketNode, places: Places) -> None:
    """On two CPUs neither sees the other's entries, so the draw alone must agree."""
    assert drawn(node, places, 77) == drawn(node, places, 77)


@pytest.mark.parametrize("protocol", ["tcp", "udp", "sctp"])
def test_round_robin_is_an_exact_rotation(node: PacketNode, places: Places, protocol: str) -> None:
    """Round robin is an exact rotation of flows; further packets of a flow take no turn."""
    backends = [at(places.there, 8000 + number) for number in range(TURNS)]
    where = serve(node, places, "nodeport", protocol, "round_robin", cluster=backends)
    clients = [at(places.client, 50_000 + number) for number in range(2 * TURNS)]
    met = []
    for client in clients:
        packet = opening(protocol, client, where)
        met.append(destination(node.ingress(packet).packet))
        assert destination(node.ingress(packet).packet) == met[-1]
    assert sorted(met[:TURNS]) == backends
    assert met[TURNS:] == met[:TURNS]
