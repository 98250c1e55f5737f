# SPDX-License-Identifier: Apache-2.0
"""Every kind of socket reaches an endpoint through every kind of address, and sees the address."""

from collections.abc import Mapping

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Sockets
from tests.kit import requests
from tests.kit.cluster import (
    BALANCER,
    EXTERNAL,
    NODEPORT,
    PORT,
    TARGET,
    VIP,
    VIP6,
    Cluster,
    endpoint,
    web,
)
from tests.kit.parameters import every_kind
from tests.kit.requests import Send

EXTERNAL6, BALANCER6 = "2001:db8::10", "2001:db8::20"
ADDRESSES = [VIP, VIP6, EXTERNAL, EXTERNAL6, BALANCER, BALANCER6]
MAPPED = [f"::ffff:{address}" for address in (VIP, EXTERNAL, BALANCER)]
NAMES = {"web-1", "web-2", "web-3"}
OF_THE_NODE = ["192.0.2.1", "fd02::1"]
LOOPBACKS = ["127.0.0.1", "::1", "127.7.7.7", "::ffff:127.0.0.1", "0.0.0.0"]
ZONE = "topology.kubernetes.io/zone"


def everything(cluster: Cluster) -> list[Manifest]:
    """A load balancer's Service of both families with three endpoints in each."""
    v4, v6 = map(endpoint, cluster.web), [endpoint(pod, v6=True) for pod in cluster.web]
    spec = {"externalIPs": [EXTERNAL, EXTERNAL6], "ingress": [BALANCER, BALANCER6]}
    return web(*v4, v6=v6, nodeport=NODEPORT, type="LoadBalancer", **spec)


@pytest.fixture(scope="module", autouse=True)
def service(cluster: Cluster) -> None:
    cluster.publish(everything(cluster))


@pytest.mark.parametrize("address", [*ADDRESSES, *MAPPED])
@every_kind
def test_every_address(sockets: Sockets, send: Send, address: str) -> None:
    """A pod and the node reach an endpoint, by a v4-mapped address too, and their peer is the
    address that they connected to.
    """
    name, peer, _ = send(sockets, address)
    assert name in NAMES
    assert peer == (address, PORT)


@pytest.mark.parametrize("address", [VIP, VIP6])
@every_kind
def test_everyone_serves(pod: Sockets, send: Send, address: str) -> None:
    """New connections and new datagram sockets are spread over all endpoints."""
    assert requests.backends(pod, address, send=send).keys() == NAMES


@every_kind
@pytest.mark.parametrize("address", OF_THE_NODE)
def test_nodeports(sockets: Sockets, send: Send, address: str) -> None:
    """Pods and node reach an endpoint through the node's own address."""
    name, peer, _ = send(sockets, address, NODEPORT)
    assert name in NAMES
    assert peer == (address, NODEPORT)


@every_kind
@pytest.mark.parametrize("address", LOOPBACKS)
def test_loopback_of_the_node(host: Sockets, send: Send, address: str) -> None:
    """The node's own processes reach NodePorts on loopback."""
    assert send(host, address, NODEPORT).name in NAMES


@pytest.mark.parametrize("address", LOOPBACKS)
def test_loopback_of_a_pod(pod: Sockets, address: str) -> None:
    """A pod's loopback is its own: nothing listens there."""
    with pytest.raises(ConnectionRefusedError):
        requests.tcp(pod, address, NODEPORT)


@pytest.mark.parametrize("address", ["10.244.1.1", "fd00:244:1::1"])
def test_other_addresses_of_the_node(sockets: Sockets, address: str) -> None:
    """With the default --nodeport-addresses only the primary address serves."""
    with pytest.raises(ConnectionRefusedError):
        requests.tcp(sockets, address, NODEPORT)


needs_mptcp = pytest.mark.skipif(not requests.has_mptcp(), reason="this kernel has no MPTCP")
TWO_COOKIES = "connect sees the subflow's socket, getpeername the MPTCP socket: two cookies"


@needs_mptcp
@pytest.mark.parametrize("address", [VIP, VIP6])
def test_mptcp(pod: Sockets, address: str) -> None:
    """MPTCP sockets are served as TCP."""
    assert requests.mptcp(pod, address).name in NAMES


@needs_mptcp
@pytest.mark.xfail(strict=True, reason=TWO_COOKIES)
def test_mptcp_peer(pod: Sockets) -> None:
    """The peer of an MPTCP socket is the address that it connected to."""
    assert requests.mptcp(pod, VIP).peer == (VIP, PORT)


@pytest.fixture
def another_service(cluster: Cluster) -> object:
    """For tests that publish what they need: the file's Service comes back after them."""
    yield
    cluster.publish(everything(cluster))


# The zone of each endpoint, that of the node, and the endpoints that a pod of the node comes to.
ZONES: list[tuple[Mapping[str, str], str, set[str]]] = [
    ({"web-1": "a", "web-2": "b", "web-3": "a"}, "", NAMES),
    ({"web-1": "a", "web-2": "b", "web-3": "a"}, "a", {"web-1", "web-3"}),
    ({"web-1": "a", "web-2": "b"}, "c", {"web-1", "web-2"}),
]


@pytest.mark.usefixtures("another_service")
def test_zones(cluster: Cluster, pod: Sockets, pods: list[Host]) -> None:
    """Zone hints keep traffic in the node's zone, once it has a label and endpoints for it."""
    for of_endpoints, zone, names in ZONES:
        node = manifests.node("node", cluster.node.v4, cluster.node.v6)
        node["metadata"]["labels"] = {ZONE: zone} if zone else {}
        hinted = [it for it in pods if it.name in of_endpoints]
        cluster.publish(node, web(*(endpoint(it, zones=of_endpoints[it.name]) for it in hinted)))
        assert requests.backends(pod, VIP).keys() == names


@pytest.mark.usefixtures("another_service")
@pytest.mark.parametrize("address", [VIP, VIP6])
@every_kind
def test_hairpin(cluster: Cluster, pods: list[Host], send: Send, address: str) -> None:
    """A pod reaches itself through its own service."""
    cluster.publish(web(endpoint(pods[0]), v6=[endpoint(pods[0], v6=True)]))
    assert send(cluster.sockets(pods[0]), address)[:2] == ("web-1", (address, PORT))


@pytest.mark.usefixtures("another_service")
def test_two_services(cluster: Cluster, pod: Sockets, pods: list[Host]) -> None:
    """What happens to one service moves nothing of another."""
    steady = [
        manifests.service("steady", ["10.96.0.20"], [{"port": PORT}]),
        manifests.endpoint_slice("steady", "IPv4", [*map(endpoint, pods[:2])], [{"port": TARGET}]),
    ]

    def entry() -> object:
        """The steady service as the map has it."""
        return next(it for key, it in cluster.maps["services"].items() if "96.0.20:" in str(key))

    cluster.publish(steady, web(endpoint(pods[2])))
    before = entry()
    for count in (3, 0, 1, 2):
        cluster.publish(steady, web(*map(endpoint, pods[:count])))
        assert requests.backends(pod, "10.96.0.20").keys() == {"web-1", "web-2"}
        assert entry() == before
