# SPDX-License-Identifier: Apache-2.0
"""The kinds of frontends: the address for clients, the agent's entry, and the result."""

from typing import Any

from scapy.layers.inet6 import ICMPv6EchoRequest

from tests.packet.frames import ICMP, Packet, Raw, at, built, carrier, ends, opening, reply, segment
from tests.packet.node import PacketNode
from tests.packet.places import Places

KINDS = {
    "cluster": "",
    "nodeport": "external",
    "balancer": "external load_balancer",
    "external": "external",
}
_PORTS = {"cluster": 80, "nodeport": 30080, "balancer": 443, "external": 8443}


def address(places: Places, kind: str) -> str:
    """Return the address to which a client sends to reach this kind of frontend."""
    hosts = {"cluster": "cluster_ip", "nodeport": "node"}
    return at(getattr(places, hosts.get(kind, kind)), _PORTS[kind])


def written(places: Places, kind: str, protocol: str = "tcp") -> str:
    """Return the address that the agent writes; for a NodePort there is none."""
    where = at(places.any, _PORTS[kind]) if kind == "nodeport" else address(places, kind)
    return f"{where}/{protocol}"


def serve(
    node: PacketNode,
    places: Places,
    kind: str,
    protocol: str = "tcp",
    *words: str,
    service: int = 1,
    **lists: Any,
) -> str:
    """Publish one frontend, with a policy; return where a client reaches it."""
    flags = " ".join((KINDS[kind], *words))
    node.publish(service, {written(places, kind, protocol): flags}, **lists)
    return address(places, kind)


def exchange(
    node: PacketNode,
    protocol: str,
    client: str,
    where: str,
    into: str = "uplink",
    out: str = "uplink",
) -> Packet:
    """Return the request as its backend gets it; the client must get the frontend's reply."""
    request = node.through(opening(protocol, client, where), into, out)
    assert ends(node.through(reply(request), out, into)) == f"{where} > {client}"
    return request


def shake(node: PacketNode, client: str, where: str) -> Packet:
    """Exchange three packets; return the last packet as the backend gets it."""
    asked = node.through(segment(client, where))
    assert ends(node.through(reply(asked))) == f"{where} > {client}"
    return node.through(segment(client, where, "A", seq=1001, ack=5001))


def ping(places: Places, host: str, size: int) -> Packet:
    """Return a pod's ping with this number of bytes."""
    if places.version == 4:
        return built(carrier(places.pod, host) / ICMP() / Raw(bytes(size)))
    return built(carrier(places.pod, host) / ICMPv6EchoRequest(data=bytes(size)))


def moves(node: PacketNode) -> None:
    """Count that a frontend has moved to another service, as the agent does after its writes."""
    settings = node.maps["settings"].get(0)
    node.put("settings", 0, settings._replace(frontend_moves=settings.frontend_moves + 1))
