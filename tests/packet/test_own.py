# SPDX-License-Identifier: Apache-2.0
"""The node's packets are translated at its sockets; untranslated packets must not leave."""

from typing import Any

import pytest

from tests.packet.frames import DEVICE, ROUTER, TCP, at, host_of, network, opening, segment
from tests.packet.node import PacketNode, knows_ingress_device
from tests.packet.places import Places
from tests.packet.services import serve


def test_an_unallocated_address_is_dropped(node: PacketNode, places: Places, protocol: str) -> None:
    """A packet to an unallocated service address is dropped, unless it is only forwarded."""
    request = opening(protocol, at(places.node, 50123), at(places.unallocated, 80))
    left = node.egress(request, into=None)
    assert (left.action, left.verdicts) == ("drop", {"unallocated": 1})
    if knows_ingress_device():
        assert node.egress(request, into="pods") == ("pass", bytes(request), {"passed": 1})


def test_source_ranges_apply_to_the_node(node: PacketNode, places: Places, protocol: str) -> None:
    """loadBalancerSourceRanges also apply to the node (kube-proxy.md 7)."""
    lists: dict[str, Any] = {"cluster": [at(places.there, 8080)]}
    where = serve(node, places, "balancer", protocol, "restricted", **lists)
    request = opening(protocol, at(places.node, 50123), where)
    node.admit(1, places.clients)
    left = node.egress(request, into=None)
    assert (left.action, left.verdicts) == ("drop", {"source_denied": 1})
    node.admit(1, f"{places.node}/{32 if places.version == 4 else 128}")
    assert node.egress(request, into=None).action == "pass"


@pytest.mark.parametrize("kind", ["cluster", "balancer"])
def test_no_local_endpoint(node: PacketNode, places: Places, protocol: str, kind: str) -> None:
    """If endpoints are only on other nodes, only the internal policy Local drops the node's
    packets.
    """
    lists: dict[str, Any] = {"cluster": [at(places.there, 8080)]}
    where = serve(node, places, kind, protocol, "local", **lists)
    request = opening(protocol, at(places.node, 50123), where)
    left = node.egress(request, into=None)
    if kind == "cluster":
        assert (left.action, left.verdicts) == ("drop", {"no_local_endpoint": 1})
    else:
        assert left == ("pass", bytes(request), {"passed": 1})


def test_netfilter_leaves_own_packets_alone(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """On netfilter what sockets sent is refused there, and the rest leaves by the node's routes,
    also while the program is at egress for another Service.
    """
    node.settings("detect_local", "netfilter")
    for where in (serve(node, places, "cluster", protocol), at(places.unallocated, 80)):
        request = opening(protocol, at(places.node, 50123), where)
        assert node.egress(request, into=None) == ("pass", bytes(request), {"passed": 1})


def test_segments_of_a_connection_pass(node: PacketNode, places: Places) -> None:
    for flags in ("A", "PA", "FA", "R"):
        request = segment(at(places.node, 50123), at(places.unallocated, 80), flags)
        assert node.egress(request, into=None) == ("pass", bytes(request), {"passed": 1})


def test_other_packets_of_the_node_pass(node: PacketNode, places: Places, protocol: str) -> None:
    """The node's own packets to other destinations pass."""
    serve(node, places, "cluster", protocol, cluster=[at(places.there, 8080)])
    for host in (places.there, places.client, places.other_node):
        request = opening(protocol, at(places.node, 50123), at(host, 8080))
        assert node.egress(request, into=None) == ("pass", bytes(request), {"passed": 1})


@pytest.mark.parametrize("kind", ["cluster", "balancer"])
def test_the_nodes_own_packets_are_refused_to_the_node(
    node: PacketNode, places: Places, protocol: str, kind: str
) -> None:
    """Without endpoints the node's socket gets port unreachable, or a reset, by this device."""
    where = serve(node, places, kind, protocol)
    left = node.egress(opening(protocol, at(places.node, 50123), where), into=None)
    assert (left.action, left.verdicts) == ("redirect", {"refused": 1})
    answer = network(left.packet)
    assert (answer.src, answer.dst) == (host_of(where), places.node)
    assert (left.packet.src, left.packet.dst) == (DEVICE, ROUTER)  # they were sent from ROUTER
    assert (TCP in left.packet) == (protocol == "tcp")


def test_the_nodes_own_packets_to_an_unserved_port_are_refused(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """A cluster IP refuses unknown ports to the node as well (kube-proxy.md 6.3)."""
    serve(node, places, "cluster", protocol, cluster=[at(places.there, 8080)])
    request = opening(protocol, at(places.node, 50123), at(places.cluster_ip, 81))
    left = node.egress(request, into=None)
    assert (left.action, left.verdicts) == ("redirect", {"refused": 1})
