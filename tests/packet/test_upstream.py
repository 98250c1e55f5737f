# SPDX-License-Identifier: Apache-2.0
"""Upstream's packet-flow tests (kube-proxy.md 19), from the manifest to the packet.

Each case is a service and the flows that upstream asks about; where ebpflb differs on purpose (an
endpoint here sees outside clients, kube-proxy.md 5.1) the expectation says so without a
star.
"""

from typing import Any

import pytest

from tests.packet.cluster import Cluster
from tests.packet.frames import at
from tests.packet.node import PacketNode
from tests.packet.places import Places

FLOWS = [("pod", "cluster"), ("client", "cluster")] + [
    (sender, kind) for sender in ("pod", "client") for kind in ("external", "balancer", "nodeport")
]


@pytest.fixture
def cluster(node: PacketNode, places: Places, protocol: str) -> Cluster:
    return Cluster(node, places, protocol)


@pytest.fixture
def tcp(node: PacketNode, places: Places) -> Cluster:
    """Return cases that do not depend on the protocol."""
    return Cluster(node, places)


def where(places: Places, kind: str, port: int = 80) -> str:
    """Return the address of this kind of frontend of the service ``public``."""
    hosts = {"cluster": places.cluster_ip, "external": places.external, "balancer": places.balancer}
    return at(places.node, 30080) if kind == "nodeport" else at(hosts[kind], port)


def public(cluster: Cluster, **spec: Any) -> None:
    """A Service that is reached in every way."""
    usual: dict[str, Any] = {
        "type": "LoadBalancer",
        "externalIPs": [cluster.places.external],
        "ports": [{"port": 80, "nodePort": 30080}],
        "ingress": [{"ip": cluster.places.balancer}],
    }
    cluster.service(**(usual | spec))


@pytest.mark.parametrize(("sender", "kind"), FLOWS)
def test_no_endpoints(cluster: Cluster, places: Places, sender: str, kind: str) -> None:
    """Without endpoints requests to every frontend of the service are refused (6.1)."""
    public(cluster)
    assert cluster.outcome_of(sender, where(places, kind)) == "refused"
    cluster.endpoints("a unready", "c gone")
    assert cluster.outcome_of(sender, where(places, kind)) == "refused"


def test_cluster_ip(cluster: Cluster, places: Places) -> None:
    """A cluster IP leads to one endpoint, to several, and to its own client (5.1)."""
    cluster.service()
    cluster.endpoints("c")
    assert cluster.outcome_of("pod", where(places, "cluster")) == "c"
    cluster.endpoints("a", "c", "d")
    assert cluster.outcome_of("pod", where(places, "cluster")) == "a c d"
    assert cluster.outcome_of("a", where(places, "cluster")) == "a* c d"


def test_wrong_port_or_protocol(tcp: Cluster, places: Places) -> None:
    """An unknown port or protocol of a cluster IP is refused, another service's port too (6.3)."""
    tcp.service()
    tcp.endpoints("a")
    tcp.service("other", clusterIPs=[places.unallocated], ports=[{"port": 81}])
    tcp.endpoints("c", name="other")
    assert tcp.outcome_of("pod", where(places, "cluster"), "udp") == "refused"
    assert tcp.outcome_of("pod", at(places.cluster_ip, 81)) == "refused"
    assert tcp.outcome_of("pod", at(places.unallocated, 80)) == "refused"
    assert tcp.outcome_of("pod", at(places.unallocated, 81)) == "c"


def test_unallocated(cluster: Cluster, places: Places) -> None:
    """An address of the service range is dropped until a service has it, and after (6.3)."""
    assert cluster.outcome_of("pod", where(places, "cluster")) == "dropped"
    cluster.service()
    assert cluster.outcome_of("pod", where(places, "cluster")) == "refused"
    cluster.withdraw()
    assert cluster.outcome_of("pod", where(places, "cluster")) == "dropped"


def test_external_addresses_are_not_reserved(cluster: Cluster, places: Places) -> None:
    """An unknown port of a VIP or an external IP is left alone (6.3)."""
    public(cluster)
    for kind in ("balancer", "external"):
        assert cluster.outcome_of("client", where(places, kind, 81)) == "left alone"
    assert cluster.outcome_of("client", at(places.node, 30081)) == "left alone"


def test_source_ranges(cluster: Cluster, places: Places) -> None:
    """Source ranges only apply to VIPs, also for pods, and precede all other rules (7)."""
    second = f"{places.balancer[:-1]}1"
    public(
        cluster,
        ingress=[{"ip": places.balancer}, {"ip": second}],
        loadBalancerSourceRanges=[f" {places.clients}"],
    )
    cluster.endpoints("c")
    for vip in (places.balancer, second):
        assert cluster.outcome_of("client", at(vip, 80)) == "c*"
        for denied in ("other_client", "pod", "remote_pod", "other_node"):
            assert cluster.outcome_of(denied, at(vip, 80)) == "dropped"
    for kind in ("nodeport", "external"):
        assert cluster.outcome_of("other_client", where(places, kind)) == "c*"
    cluster.endpoints()
    assert cluster.outcome_of("other_client", at(second, 80)) == "dropped"
    assert cluster.outcome_of("client", at(second, 80)) == "refused"


def test_source_ranges_precede_the_short_circuit(tcp: Cluster, places: Places) -> None:
    """Under the external policy Local a pod outside the ranges is dropped all the same (7)."""
    public(tcp, externalTrafficPolicy="Local", loadBalancerSourceRanges=[places.clients])
    tcp.endpoints("a", "c")
    assert tcp.outcome_of("pod", where(places, "balancer")) == "dropped"
    assert tcp.outcome_of("client", where(places, "balancer")) == "a"
    assert tcp.outcome_of("pod", where(places, "external")) == "a c"


def test_node_port_of_another_node(cluster: Cluster, places: Places) -> None:
    """Another node's NodePort is not intercepted: the packet goes on to that node (4)."""
    public(cluster)
    cluster.endpoints("a")
    for sender in ("pod", "client"):
        assert cluster.outcome_of(sender, at(places.other_node, 30080)) == "left alone"


def test_protocols_of_one_port(tcp: Cluster, places: Places) -> None:
    """TCP, UDP and SCTP of one number are three service ports, each with its own target (1.4)."""
    names = ("TCP", "UDP", "SCTP")
    tcp.service(ports=[{"name": p.lower(), "port": 80, "protocol": p} for p in names])
    for letter, p in zip("acd", names, strict=True):
        ports = [{"name": p.lower(), "port": 9000, "protocol": p}]
        tcp.endpoints(letter, ports=ports)
        assert tcp.outcome_of("pod", where(places, "cluster"), p.lower()) == letter
        for other in set(names) - {p}:
            assert tcp.outcome_of("pod", where(places, "cluster"), other.lower()) == "refused"


def test_shared_address(tcp: Cluster, places: Places) -> None:
    """Two services may share a VIP by different ports, or by protocols of one port (4)."""
    for letter, (name, port) in zip("acd", (("a", 80), ("b", 81), ("c", 80)), strict=True):
        protocol = "UDP" if name == "c" else "TCP"
        tcp.service(
            name,
            clusterIPs=[f"{places.unallocated}{port % 7}"],
            ports=[{"port": port, "protocol": protocol}],
            ingress=[{"ip": places.balancer}],
        )
        tcp.endpoints(letter, name=name, ports=[{"port": 8080, "protocol": protocol}])
    assert tcp.outcome_of("pod", at(places.balancer, 80)) == "a*"
    assert tcp.outcome_of("pod", at(places.balancer, 81)) == "c*"
    assert tcp.outcome_of("pod", at(places.balancer, 80), "udp") == "d*"


def test_repeated_changes(tcp: Cluster, places: Places) -> None:
    """Services, ports and endpoints that come and go leave others as they are (16.3)."""
    public(tcp)
    tcp.endpoints("a")
    tcp.service("other", clusterIPs=[places.unallocated])
    assert tcp.outcome_of("pod", at(places.unallocated, 80)) == "refused"
    tcp.endpoints("c", name="other")
    assert tcp.outcome_of("pod", at(places.unallocated, 80)) == "c"
    public(tcp, ports=[{"port": 80}])
    assert tcp.outcome_of("client", where(places, "nodeport")) == "left alone"
    tcp.withdraw()
    assert tcp.outcome_of("client", where(places, "balancer")) == "left alone"
    assert tcp.outcome_of("pod", at(places.unallocated, 80)) == "c"
    public(tcp)
    assert tcp.outcome_of("client", where(places, "nodeport")) == "a"
