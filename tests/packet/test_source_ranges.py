# SPDX-License-Identifier: Apache-2.0
"""loadBalancerSourceRanges: who may come by a load balancer's address (kube-proxy.md 7)."""

from ipaddress import IPv4Address

import pytest

from tests.packet.frames import at, opening
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve

RESTRICTED = "external load_balancer restricted"


@pytest.fixture
def where(node: PacketNode, places: Places, protocol: str) -> str:
    """A load balancer's address that lets in the network of the client."""
    node.admit(1, places.clients)
    there = [at(places.there, 8080)]
    return serve(node, places, "balancer", protocol, "restricted", cluster=there)


def test_services_apart(node: PacketNode, places: Places, protocol: str, where: str) -> None:
    """The ranges of one service do not count for another."""
    words = {f"{at(places.external, 443)}/{protocol}": RESTRICTED}
    node.publish(2, words, cluster=[at(places.there, 8080)])
    request = opening(protocol, at(places.client, 50123), at(places.external, 443))
    assert node.ingress(request).verdicts == {"source_denied": 1}
    node.admit(2, f"{places.client}/{32 if places.version == 4 else 128}")
    assert node.ingress(request).verdicts == {"translated": 1}
    neighbour = opening(protocol, at(f"{places.client[:-1]}8", 50123), at(places.external, 443))
    assert node.ingress(neighbour).verdicts == {"source_denied": 1}


@pytest.mark.parametrize("length", [1, 8, 24, 25, 31, 32])
def test_lengths(node: PacketNode, length: int) -> None:
    """A range ends where its prefix does."""
    node.admit(1, f"128.0.0.0/{length}")
    words = {"203.0.113.10:443": RESTRICTED}
    node.publish(1, words, cluster=["10.244.2.20:8080"])
    first, last = 128 << 24, (128 << 24) + (1 << (32 - length)) - 1
    verdicts = {first - 1: "source_denied", first: "translated", last: "translated"}
    if last < (1 << 32) - 1:
        verdicts[last + 1] = "source_denied"
    for number, verdict in verdicts.items():
        request = opening("tcp", f"{IPv4Address(number)}:50123", "203.0.113.10:443")
        assert node.ingress(request).verdicts == {verdict: 1}


def test_known_flow(node: PacketNode, places: Places, protocol: str, where: str) -> None:
    """Only new flows are checked: a connection outlives a change of the ranges."""
    request = opening(protocol, at(places.client, 50123), where)
    node.ingress(request)
    node.maps["source_ranges"].delete([key for key, _ in node.maps["source_ranges"].items()])
    assert node.ingress(request).verdicts == {"established": 1}
    other = opening(protocol, at(places.client, 50124), where)
    assert node.ingress(other).verdicts == {"source_denied": 1}
