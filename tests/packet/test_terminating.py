# SPDX-License-Identifier: Apache-2.0
"""Endpoints that come and go, under either policy, from the slice to the packet.

The cases are upstream's: "terminating endpoints, traffic policy Local" and "... Cluster", and for
the internal policy its four layouts; each ends with all endpoints deleted (kube-proxy.md 3, 6.1).
"""

import pytest

from tests.packet.cluster import Cluster
from tests.packet.frames import at
from tests.packet.node import PacketNode
from tests.packet.places import Places

# endpoints: what a pod meets by the cluster IP; an outside client by the VIP, Local and Cluster
TERMINATING = {
    "ready ones exist": (
        ("a", "b", "a leaving", "c", "d leaving"),
        ("a b c", "a b", "a b c*"),
    ),
    "ready ones beside leaving ones": (
        ("a", "b leaving", "c", "d gone"),
        ("a c", "a", "a c*"),
    ),
    "leaving ones alone": (
        ("a leaving", "b gone", "c leaving", "d gone"),
        ("a c", "a", "a c*"),
    ),
    "a leaving one here, a ready one there": (
        ("a leaving", "c"),
        ("c", "a", "c*"),
    ),
    "leaving ones elsewhere alone": (
        ("c leaving", "d leaving"),
        ("c d", "dropped", "c* d*"),
    ),
    "leaving ones elsewhere, a useless one here": (
        ("a gone", "b unready", "c leaving"),
        ("c", "dropped", "c*"),
    ),
    "nobody usable": (
        ("a gone", "b unready", "c gone"),
        ("refused", "refused", "refused"),
    ),
}
# endpoints: what a pod and an outside client meet by a cluster IP with the internal policy Local
INTERNAL = {
    "none here": (("c", "d"), "dropped", "dropped"),
    "one here": (("a", "c"), "a", "a*"),
    "all here": (("a", "b"), "a b", "a* b*"),
    "one leaving here": (("a leaving", "c"), "a", "a*"),
    "none": ((), "refused", "refused"),
}

terminating = pytest.mark.parametrize(("described", "found"), TERMINATING.values(), ids=TERMINATING)


@pytest.fixture
def cluster(node: PacketNode, places: Places, protocol: str) -> Cluster:
    return Cluster(node, places, protocol)


def balanced(cluster: Cluster, policy: str) -> None:
    """The Service, with a load balancer's address and an external one."""
    cluster.service(
        type="LoadBalancer",
        externalTrafficPolicy=policy,
        externalIPs=[cluster.places.external],
        ports=[{"port": 80, "nodePort": 30080}],
        ingress=[{"ip": cluster.places.balancer}],
    )


@terminating
@pytest.mark.parametrize("policy", ["Local", "Cluster"])
def test_terminating_endpoints(
    cluster: Cluster,
    places: Places,
    policy: str,
    described: tuple[str, ...],
    found: tuple[str, str, str],
) -> None:
    """Ready ones, else serving terminating ones; none: refused; none on this node: dropped."""
    balanced(cluster, policy)
    cluster.endpoints(*described)
    inside, local, everywhere = found
    vip, external = at(places.balancer, 80), at(places.external, 80)
    cluster_ip, nodeport = at(places.cluster_ip, 80), at(places.node, 30080)
    assert cluster.outcome_of("pod", cluster_ip) == inside
    for where in (vip, external, nodeport):
        expected = local if policy == "Local" else everywhere
        assert cluster.outcome_of("client", where) == expected
    cluster.endpoints()
    for sender, where in (("pod", cluster_ip), ("client", vip), ("client", nodeport)):
        assert cluster.outcome_of(sender, where) == "refused"


@terminating
def test_pods_of_a_local_service(
    cluster: Cluster,
    places: Places,
    described: tuple[str, ...],
    found: tuple[str, str, str],
) -> None:
    """A pod that uses a VIP with the policy Local reaches the cluster list, unmasqueraded (4.3)."""
    balanced(cluster, "Local")
    cluster.endpoints(*described)
    assert cluster.outcome_of("pod", at(places.balancer, 80)) == found[0]


@pytest.mark.parametrize(("described", "pod", "client"), INTERNAL.values(), ids=INTERNAL)
def test_internal_policy_local(
    cluster: Cluster,
    places: Places,
    described: tuple[str, ...],
    pod: str,
    client: str,
) -> None:
    """By the cluster IP all clients reach only this node's endpoints (4.1)."""
    cluster.service(internalTrafficPolicy="Local", externalIPs=[places.external])
    cluster.endpoints(*described)
    where = at(places.cluster_ip, 80)
    assert cluster.outcome_of("pod", where) == pod
    assert cluster.outcome_of("client", where) == client
    cluster.endpoints()
    assert cluster.outcome_of("pod", where) == "refused"


def test_internal_policy_spares_external_addresses(cluster: Cluster, places: Places) -> None:
    """The internal policy has no influence on external addresses (4.2)."""
    cluster.service(internalTrafficPolicy="Local", externalIPs=[places.external])
    cluster.endpoints("c", "d")
    assert cluster.outcome_of("client", at(places.external, 80)) == "c* d*"
    assert cluster.outcome_of("client", at(places.cluster_ip, 80)) == "dropped"


def test_external_policy_spares_the_cluster_ip(cluster: Cluster, places: Places) -> None:
    """The external policy has no influence on the cluster IP (4.1)."""
    balanced(cluster, "Local")
    cluster.endpoints("c", "d")
    assert cluster.outcome_of("client", at(places.cluster_ip, 80)) == "c* d*"
    assert cluster.outcome_of("client", at(places.balancer, 80)) == "dropped"
