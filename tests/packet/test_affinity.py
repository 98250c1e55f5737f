# SPDX-License-Identifier: Apache-2.0
"""Session affinity in packets: by the client's address, whatever its port (kube-proxy.md 9)."""

from ipaddress import ip_address

from ebpflb.datapath.maps.records import Affinity, AffinityKey
from tests.packet.frames import at, destination, opening
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve, written

CLIENTS = range(50_000, 50_024)


def backends(places: Places) -> list[str]:
    return [at(places.there, port) for port in range(8080, 8088)]


def met(node: PacketNode, host: str, where: str, protocol: str) -> set[str]:
    """Where a client's flows come to."""
    asked = (node.ingress(opening(protocol, at(host, port), where)) for port in CLIENTS)
    return {destination(came.packet) for came in asked}


def test_sticks(node: PacketNode, places: Places, protocol: str) -> None:
    """All flows of a client go to one backend; those of another client need not."""
    where = serve(node, places, "nodeport", protocol, cluster=backends(places), affinity=60)
    first = met(node, places.client, where, protocol)
    assert len(first) == 1
    assert met(node, places.client, where, protocol) == first
    assert node.maps["service_stats"].get(1)[:2] == (len(CLIENTS), len(CLIENTS) - 1)
    others = (at(f"{places.client[:-1]}{number}", 50_000) for number in range(10, 30))
    asked = (node.ingress(opening(protocol, client, where)) for client in others)
    assert len({destination(came.packet) for came in asked}) > 1


def test_without(node: PacketNode, places: Places, protocol: str) -> None:
    """Without affinity a client's flows spread."""
    where = serve(node, places, "nodeport", protocol, cluster=backends(places))
    assert len(met(node, places.client, where, protocol)) > 1


def test_shared_by_frontends(node: PacketNode, places: Places, protocol: str) -> None:
    """All frontends of a service port share it; another service has its own."""
    words = {written(places, kind, protocol): "external" for kind in ("nodeport", "balancer")}
    node.publish(1, words, cluster=backends(places), affinity=60)
    nodeport, balancer = at(places.node, 30080), at(places.balancer, 443)
    once = met(node, places.client, nodeport, protocol)
    assert met(node, places.client, balancer, protocol) == once
    remembered = {key for key, _ in node.maps["affinity"].items()}
    assert remembered == {AffinityKey(0, ip_address(places.client), 1)}


def test_backend_gone(node: PacketNode, places: Places, protocol: str) -> None:
    """When the remembered backend is gone, another is remembered."""
    where = serve(node, places, "nodeport", protocol, cluster=backends(places), affinity=60)
    (former,) = met(node, places.client, where, protocol)
    rest = [backend for backend in backends(places) if backend != former]
    serve(node, places, "nodeport", protocol, cluster=rest, affinity=60)
    other = {
        destination(node.ingress(opening(protocol, at(places.client, port), where)).packet)
        for port in range(51_000, 51_024)
    }
    assert len(other) == 1
    assert other < set(rest)


def test_timeout(node: PacketNode, places: Places) -> None:
    """A record that is older than the timeout counts no more."""
    where = serve(node, places, "nodeport", cluster=backends(places), affinity=1)
    client = AffinityKey(0, ip_address(places.client), 1)
    met_by_age = set()
    for port in CLIENTS:
        number = node.backend_id(1, at(places.there, 8080))
        node.put("affinity", client, Affinity(1, number))
        node.ingress(opening("tcp", at(places.client, port), where))
        met_by_age.add(node.maps["affinity"].get(client).backend)
    assert len(met_by_age) > 1


def test_local_list(node: PacketNode, places: Places, protocol: str) -> None:
    """A remembered backend that the policy does not allow this time is not used."""
    here, there = at(places.here, 8080), at(places.there, 8080)
    lists = {"cluster": [there], "local": [here], "here": [here], "affinity": 60}
    node.publish(
        1,
        {
            written(places, "nodeport", protocol): "external",
            written(places, "balancer", protocol): "external load_balancer local",
        },
        **lists,
    )
    assert met(node, places.client, at(places.node, 30080), protocol) == {there}
    assert met(node, places.client, at(places.balancer, 443), protocol) == {here}
