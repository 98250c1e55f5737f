# SPDX-License-Identifier: Apache-2.0
"""A flow's backend is a fixed function of its tuple and of this node's secret."""

from ipaddress import ip_address

from ebpflb.entries.services import Choice, Range
from ebpflb.plan.tables import ALWAYS
from tests.packet.frames import at, destination, opening
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve, written
from tests.publishing import frontend

PORTS = range(50_000, 50_064)
BACKENDS = 8


def drawn(node: PacketNode, places: Places, secret: int, *words: str) -> list[str]:
    """Return the backend of each source port of a client; no flow remembers an earlier draw."""
    backends = [at(places.there, 8000 + number) for number in range(BACKENDS)]
    where = serve(node, places, "nodeport", "udp", *words, cluster=backends)
    node.put("secret", 0, secret)
    packets = [opening("udp", at(places.client, port), where) for port in PORTS]
    found = [destination(node.ingress(packet).packet) for packet in packets]
    flows = node.maps["other_flows"]
    flows.delete([key for key, _ in flows.items()])
    return found


def test_no_client_can_choose_its_backend_by_its_port(node: PacketNode, places: Places) -> None:
    """Another secret gives other backends for the same ports, distributed as evenly."""
    one, other = (drawn(node, places, secret) for secret in (1, 0x1234_5678_9ABC_DEF1))
    agreeing = sum(a == b for a, b in zip(one, other, strict=True))
    assert agreeing < len(PORTS) // 2  # 8 of 64 by chance
    assert len(set(one)) == len(set(other)) == BACKENDS


def test_with_maglev_every_node_draws_the_same(node: PacketNode, places: Places) -> None:
    """Whatever a node's secret is, a flow meets the same backend."""
    one, other = (drawn(node, places, secret, "by_tuple") for secret in (1, 0x1234_5678_9ABC_DEF1))
    assert one == other and len(set(one)) == BACKENDS


def test_a_client_has_one_backend_by_its_address(node: PacketNode, places: Places) -> None:
    """With source-hash: whatever its port is; the backends are distributed among clients."""
    backends = [at(places.there, 8000 + number) for number in range(BACKENDS)]
    where = serve(node, places, "nodeport", "udp", "by_client", cluster=backends)
    clients = [str(ip_address(places.client) + number) for number in range(32)]
    drawn_by = {
        client: {
            destination(node.ingress(opening("udp", at(client, port), where)).packet)
            for port in PORTS[:3]
        }
        for client in clients
    }
    assert {len(its) for its in drawn_by.values()} == {1}
    assert len(set.union(*drawn_by.values())) > BACKENDS // 2


def test_a_packet_draws_of_the_table_also_where_weights_are_even(
    node: PacketNode, places: Places
) -> None:
    """All nodes draw the same by maglev's table, here the first backend, whatever a socket does."""
    backends = [at(places.there, 8000 + number) for number in range(BACKENDS)]
    where = serve(node, places, "nodeport", "udp", "by_tuple even", cluster=backends)
    key = frontend(written(places, "nodeport", "udp"))
    service = node.maps["services"].get(key)
    for place in range(7):
        node.put("choices", place, Choice(service.cluster.base, service.cluster.base, ALWAYS))
    node.put("services", key, service._replace(table=Range(0, 7)))
    packets = [opening("udp", at(places.client, port), where) for port in PORTS]
    assert {destination(node.ingress(each).packet) for each in packets} == {backends[0]}
