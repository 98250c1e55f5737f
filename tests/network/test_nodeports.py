# SPDX-License-Identifier: Apache-2.0
"""NodePorts: on this node's own addresses and its loopback; another node serves its own."""

from collections.abc import Iterator
from ipaddress import ip_address
from types import SimpleNamespace

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.sockets import Sockets
from tests.kit import requests
from tests.kit.cluster import NODEPORT, Cluster, endpoint, web
from tests.kit.requests import Send

NAMES = {"web-1", "web-2", "web-3"}
LOOPBACKS = ["127.0.0.1", "::1", "127.7.7.7", "::ffff:127.0.0.1", "0.0.0.0"]
every_way = pytest.mark.parametrize("send", requests.KINDS.values(), ids=requests.KINDS)


@pytest.fixture(scope="module", autouse=True)
def service(cluster: Cluster) -> None:
    v4, v6 = map(endpoint, cluster.web), [endpoint(pod, v6=True) for pod in cluster.web]
    cluster.publish(web(*v4, v6=v6, nodeport=NODEPORT))


@pytest.fixture(scope="module")
def other(cluster: Cluster, service: None) -> Iterator[SimpleNamespace]:
    """A second node with the same services, and a pod."""
    node = cluster.lab.node("other", 2)
    far = cluster.lab.pod(node, "far", 2)
    cluster.lab.join(cluster.node, node)
    cluster.add_agent(node).start()
    yield SimpleNamespace(host=node, far=cluster.sockets(far))


@every_way
@pytest.mark.parametrize("who", ["client", "node"])
@pytest.mark.parametrize("family", ["v4", "v6"])
def test_on_this_node(cluster: Cluster, send: Send, who: str, family: str) -> None:
    """Pods and node reach an endpoint through the node's own address."""
    address = getattr(cluster.node, family)
    name, peer, _ = send(cluster.sockets(getattr(cluster, who)), address, NODEPORT)
    assert name in NAMES
    assert peer == (address, NODEPORT)


@every_way
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
def test_other_addresses_of_the_node(pod: Sockets, host: Sockets, address: str) -> None:
    """With the default --nodeport-addresses only the primary address serves."""
    for sockets in (pod, host):
        with pytest.raises(ConnectionRefusedError):
            requests.tcp(sockets, address, NODEPORT)


@pytest.mark.parametrize("who", ["client", "node"])
@pytest.mark.parametrize("family", ["v4", "v6"])
@pytest.mark.parametrize("send", [requests.tcp, requests.udp])
def test_another_node(
    cluster: Cluster, other: SimpleNamespace, send: Send, who: str, family: str
) -> None:
    """A connection to another node's address travels to that node, and comes back as its."""
    address = getattr(other.host, family)
    answer = send(cluster.sockets(getattr(cluster, who)), address, NODEPORT)
    assert answer.name in NAMES
    assert answer.source == address


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_agents_side_by_side(cluster: Cluster, other: SimpleNamespace, family: str) -> None:
    """Each node serves the pods of both, on its own address."""
    for host in (cluster.node, other.host):
        assert requests.tcp(other.far, getattr(host, family), NODEPORT).name in NAMES


def test_protocols_are_apart(cluster: Cluster, pod: Sockets) -> None:
    """A NodePort of TCP does not serve UDP."""
    service, *slices = web(*map(endpoint, cluster.web), nodeport=NODEPORT)
    service["spec"]["ports"].pop()
    cluster.publish(service, *slices)
    assert requests.tcp(pod, cluster.node.v4, NODEPORT).name in NAMES
    with pytest.raises(ConnectionRefusedError):
        requests.connected_udp(pod, cluster.node.v4, NODEPORT)


def test_gone(cluster: Cluster, pod: Sockets) -> None:
    """A Service that gives its NodePort up is no longer answered there."""
    cluster.publish(web(*map(endpoint, cluster.web), type="ClusterIP"))
    with pytest.raises(ConnectionRefusedError):
        requests.tcp(pod, cluster.node.v4, NODEPORT)


def test_address_that_comes_later(cluster: Cluster, pod: Sockets) -> None:
    """A further address of the node serves NodePorts as long as the node has it."""
    cluster.agent.stop()
    cluster.agent.options = ("--nodeport-addresses", "192.0.2.0/24")
    cluster.publish(web(*map(endpoint, cluster.web), nodeport=NODEPORT))
    cluster.agent.start()
    addresses, late = cluster.maps["node_addresses"], ip_address("192.0.2.77")
    cluster.node.ip("address add 192.0.2.77/32 dev eth0")
    wait_until("the address is served", lambda: addresses.get(late) is not None)
    assert requests.tcp(pod, "192.0.2.77", NODEPORT).name in NAMES
    cluster.node.ip("address del 192.0.2.77/32 dev eth0")
    wait_until("it is served no more", lambda: addresses.get(late) is None)
