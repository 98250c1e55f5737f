# SPDX-License-Identifier: Apache-2.0
"""Session affinity from the manifest to the packet: what shares it, and what ends it (9)."""

from typing import Any

import pytest

from tests.packet.cluster import Cluster
from tests.packet.frames import at
from tests.packet.node import PacketNode
from tests.packet.places import Places

WITH_AFFINITY: dict[str, Any] = {"sessionAffinity": "ClientIP"}
BOTH = ("c", "d")
BOTH_MASQUERADED = "c* d*"


@pytest.fixture
def cluster(node: PacketNode, places: Places, protocol: str) -> Cluster:
    return Cluster(node, places, protocol)


def ways(places: Places) -> list[str]:
    return [at(places.node, 30080), at(places.balancer, 80), at(places.external, 80)]


def publish(cluster: Cluster, **spec: Any) -> None:
    cluster.service(
        externalIPs=[cluster.places.external],
        ports=[{"port": 80, "nodePort": 30080}],
        ingress=[{"ip": cluster.places.balancer}],
        **spec,
    )


def test_all_addresses_of_a_port_share_it(cluster: Cluster, places: Places) -> None:
    """Cluster IP, NodePort, VIP and external IP of a service port lead a client to one endpoint."""
    publish(cluster, **WITH_AFFINITY)
    cluster.endpoints(*BOTH)
    once = cluster.outcome_of("client", at(places.cluster_ip, 80))
    assert once in ("c*", "d*")
    for where in ways(places):
        assert cluster.outcome_of("client", where) == once


def test_ports_of_a_service_do_not_share_it(cluster: Cluster, places: Places) -> None:
    """Another port of the same Service remembers its own endpoint, and another Service too."""
    listed: list[dict[str, Any]] = [
        {"name": f"p{number}", "port": number} for number in range(80, 90)
    ]
    cluster.service(ports=listed, **WITH_AFFINITY)
    cluster.endpoints(*BOTH, ports=[{**port, "port": 8080} for port in listed])
    found = {cluster.outcome_of("pod", at(places.cluster_ip, port["port"])) for port in listed}
    assert found == {"c", "d"}  # each port one; a draw is its tuple's own


def test_off_and_on(cluster: Cluster, places: Places) -> None:
    """Switched off, traffic spreads at once; switched on again, it sticks at once."""
    publish(cluster)
    cluster.endpoints(*BOTH)
    assert cluster.outcome_of("client", ways(places)[0]) == BOTH_MASQUERADED
    publish(cluster, **WITH_AFFINITY)
    assert cluster.outcome_of("client", ways(places)[0]) in ("c*", "d*")
    publish(cluster, sessionAffinity="None")
    assert cluster.outcome_of("client", ways(places)[0]) == BOTH_MASQUERADED


def test_remembered_endpoint_unready(cluster: Cluster, places: Places) -> None:
    """An endpoint that is out of the list is forgotten, though it still serves its flows."""
    publish(cluster, **WITH_AFFINITY)
    cluster.endpoints(*BOTH)
    once = cluster.outcome_of("client", ways(places)[0])
    left, other = ("c", "d") if once == "c*" else ("d", "c")
    cluster.endpoints(f"{left} leaving", other)
    assert cluster.outcome_of("client", ways(places)[0]) == f"{other}*"
    cluster.endpoints(*BOTH)
    assert cluster.outcome_of("client", ways(places)[0]) == f"{other}*"
