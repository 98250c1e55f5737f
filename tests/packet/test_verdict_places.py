# SPDX-License-Identifier: Apache-2.0
"""Where the verdict about a service without endpoints applies (kube-proxy.md 6.2, 12 row 5)."""

import pytest

from tests.packet.cluster import Cluster
from tests.packet.frames import at
from tests.packet.node import PacketNode
from tests.packet.places import Places


@pytest.fixture
def cluster(node: PacketNode, places: Places, protocol: str) -> Cluster:
    """A NodePort service, with the bridge's address not among those that serve NodePorts."""
    made = Cluster(node, places, protocol)
    made.service(
        type="NodePort", externalTrafficPolicy="Local", ports=[{"port": 80, "nodePort": 30080}]
    )
    return made


@pytest.mark.parametrize("described", [(), ("c",)], ids=["no endpoint", "none here"])
def test_node_port_of_an_excluded_address(
    cluster: Cluster, places: Places, described: tuple[str, ...]
) -> None:
    """An address of the node that serves no NodePorts refuses and drops nothing either."""
    cluster.endpoints(*described)
    excluded, served = at(places.bridge, 30080), at(places.node, 30080)
    for sender in ("client", "pod"):
        assert cluster.outcome_of(sender, excluded) == "left alone"
    assert cluster.outcome_of("client", served) == ("dropped" if described else "refused")
    cluster.endpoints("a")
    assert cluster.outcome_of("client", excluded) == "left alone"
    assert cluster.outcome_of("client", served) == "a"


def test_address_that_becomes_eligible(node: PacketNode, cluster: Cluster, places: Places) -> None:
    """As soon as the address serves NodePorts, the verdict applies there as well."""
    node.owns(places.bridge)
    assert cluster.outcome_of("pod", at(places.bridge, 30080)) == "refused"


def test_service_address_on_this_node(node: PacketNode, cluster: Cluster, places: Places) -> None:
    """An external IP that is assigned here is refused like one that is not."""
    node.owns(places.external)
    cluster.service("other", clusterIPs=[places.unallocated], externalIPs=[places.external])
    for sender in ("client", "pod"):
        assert cluster.outcome_of(sender, at(places.external, 80)) == "refused"


def test_host_port_beside_a_node_port(cluster: Cluster, places: Places) -> None:
    """Other ports of the node, and its port in other protocols, are the host's (8)."""
    cluster.endpoints("a")
    for protocol in {"tcp", "udp", "sctp"} - {cluster.protocol}:
        assert cluster.outcome_of("client", at(places.node, 30080), protocol) == "left alone"
    assert cluster.outcome_of("client", at(places.node, 8080)) == "left alone"
