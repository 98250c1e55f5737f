# SPDX-License-Identifier: Apache-2.0
"""Session affinity of packets, by the client's address, whatever its port (kube-proxy.md 9)."""

from ipaddress import ip_address

import pytest

from ebpflb.kernel.maps.records import Affinity, AffinityKey
from tests.packet.frames import at, chunk, destination, opening, reply, segment
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve

CLIENTS = range(50_000, 50_024)


def backends(places: Places) -> list[str]:
    return [at(places.there, port) for port in range(8080, 8088)]


def met(node: PacketNode, host: str, where: str, protocol: str) -> set[str]:
    """Return the backends that a client's flows reach."""
    asked = (node.ingress(opening(protocol, at(host, port), where)) for port in CLIENTS)
    return {destination(came.packet) for came in asked}


def known(node: PacketNode, name: str = "affinity") -> set[AffinityKey]:
    return {key for key, _ in node.maps[name].items()}


def test_all_flows_of_a_client_go_to_one_backend(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """All flows of a client go to one backend; flows of another client may go elsewhere."""
    where = serve(node, places, "nodeport", protocol, cluster=backends(places), affinity=60)
    first = met(node, places.client, where, protocol)
    assert len(first) == 1
    assert met(node, places.client, where, protocol) == first
    assert node.maps["service_stats"].get(1)[:2] == (len(CLIENTS), len(CLIENTS) - 1)
    others = (at(f"{places.client[:-1]}{number}", 50_000) for number in range(10, 30))
    asked = (node.ingress(opening(protocol, client, where)) for client in others)
    assert len({destination(came.packet) for came in asked}) > 1


@pytest.mark.parametrize("name", ["affinity", "new_affinity"])
def test_a_record_older_than_the_timeout_is_ignored(
    node: PacketNode, places: Places, name: str
) -> None:
    where = serve(node, places, "nodeport", cluster=backends(places), affinity=1)
    client = AffinityKey(0, ip_address(places.client), 1)
    met_by_age = set()
    for port in CLIENTS:
        number = node.backend_id(1, at(places.there, 8080))
        node.maps["new_affinity"].delete([client])
        node.put(name, client, Affinity(1, number))
        node.ingress(opening("tcp", at(places.client, port), where))
        met_by_age.add(node.maps["new_affinity"].get(client).backend)
    assert len(met_by_age) > 1


def test_client_that_is_answered(node: PacketNode, places: Places, protocol: str) -> None:
    """A client becomes known only after it has answered (TCP, SCTP) or was answered (UDP)."""
    where = serve(node, places, "nodeport", protocol, cluster=backends(places), affinity=60)
    client = at(places.client, 50_000)
    later = segment(client, where, "A", seq=1001, ack=5001)
    if protocol == "sctp":
        later = chunk(client, where, "data")
    asked = node.through(opening(protocol, client, where))
    if protocol != "udp":
        node.through(later)  # no one has answered yet: it may be forged
    assert known(node) == set()
    node.through(reply(asked))
    if protocol != "udp":
        assert known(node) == set()
        node.through(later)
    assert known(node) == {AffinityKey(0, ip_address(places.client), 1)}
    assert all("affinity" not in flow.flags for flow in node.flows(protocol).values())
    node.maps["new_affinity"].delete(list(known(node, "new_affinity")))
    assert met(node, places.client, where, protocol) == {destination(asked)}
    assert known(node, "new_affinity") == set()


def test_forged_clients(node: PacketNode, places: Places, protocol: str) -> None:
    """Clients whose flows have no answer are kept in a separate map, and evict no known client."""
    where = serve(node, places, "nodeport", protocol, cluster=backends(places), affinity=60)
    for number in range(1, 40):
        node.ingress(opening(protocol, at(f"{places.client[:-1]}{number}", 50_000), where))
    assert known(node) == set()
    assert len(known(node, "new_affinity")) == 39
