# SPDX-License-Identifier: Apache-2.0
"""Unserved addresses of services are refused or dropped, as in kube-proxy's nftables mode (6.3)."""

import pytest

from ebpflb.entries.services import NO_PREFIX
from tests.packet.frames import at, network, opening, segment
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import ping, serve


@pytest.fixture(autouse=True)
def served(node: PacketNode, places: Places) -> str:
    """Publish a service on TCP port 80 of the cluster IP."""
    return serve(node, places, "cluster", cluster=[at(places.there, 8080)])


def test_connection_to_unallocated(node: PacketNode, places: Places) -> None:
    """An existing connection, which conntrack may still know, goes on."""
    for host in (places.unallocated, places.cluster_ip):
        request = segment(at(places.pod, 50123), at(host, 81), "PA", payload=b"more")
        assert node.ingress(request, "pods") == ("pass", bytes(request), {"passed": 1})


def test_outside_span(node: PacketNode, places: Places, protocol: str) -> None:
    """For addresses outside the span, nothing further is looked up."""
    node.settings("detect_local", span_v4=NO_PREFIX, span_v6=NO_PREFIX)
    for host in (places.cluster_ip, places.unallocated):
        request = opening(protocol, at(places.pod, 50123), at(host, 81))
        assert node.ingress(request, "pods") == ("pass", bytes(request), {"passed": 1})


def test_inside_span_alone(node: PacketNode, places: Places, protocol: str) -> None:
    """Addresses that are within the span but in no service range pass."""
    table = node.maps["service_ranges"]
    table.delete([key for key, _ in table.items()])
    request = opening(protocol, at(places.pod, 50123), at(places.unallocated, 80))
    assert node.ingress(request, "pods") == ("pass", bytes(request), {"passed": 1})


@pytest.mark.parametrize("size", [0, 3, 20, 56, 1400])
def test_a_ping_to_a_cluster_ip_is_refused(node: PacketNode, places: Places, size: int) -> None:
    """A ping to a cluster IP is refused, a ping to an unallocated address is dropped (6.3)."""
    request = ping(places, places.cluster_ip, size)
    came = node.ingress(request, "pods")
    assert (came.action, came.verdicts) == ("redirect", {"refused": 1})
    assert (network(came.packet).src, network(came.packet).dst) == (places.cluster_ip, places.pod)
    error = bytes(network(came.packet).payload)
    assert tuple(error[:2]) == ((3, 3) if places.version == 4 else (1, 4))
    assert bytes(network(request)).startswith(error[8:]) and len(error) >= 36
    lost = node.ingress(ping(places, places.unallocated, size), "pods")
    assert (lost.action, lost.verdicts) == ("drop", {"unallocated": 1})


def test_echo_of_others(node: PacketNode, places: Places) -> None:
    """Pings to other addresses are left alone, and so are all pings at egress."""
    for host in (places.client, places.node, places.balancer):
        request = ping(places, host, 56)
        assert node.ingress(request, "pods") == ("pass", bytes(request), {"passed": 1})
    request = ping(places, places.cluster_ip, 56)
    assert node.egress(request) == ("pass", bytes(request), {"passed": 1})
