# SPDX-License-Identifier: Apache-2.0
"""Every kind of socket reaches an endpoint through every kind of address, and sees the address."""

import pytest

from ebpflb.lab.sockets import Sockets
from tests.kit import requests
from tests.kit.cluster import BALANCER, EXTERNAL, PORT, VIP, VIP6, Cluster, endpoint, web
from tests.kit.requests import Send

EXTERNAL6, BALANCER6 = "2001:db8::10", "2001:db8::20"
ADDRESSES = [VIP, VIP6, EXTERNAL, EXTERNAL6, BALANCER, BALANCER6]
NAMES = {"web-1", "web-2", "web-3"}


@pytest.fixture(scope="module", autouse=True)
def service(cluster: Cluster) -> None:
    """A load balancer's Service of both families with three endpoints in each."""
    v4, v6 = map(endpoint, cluster.web), [endpoint(pod, v6=True) for pod in cluster.web]
    external, balancer = [EXTERNAL, EXTERNAL6], [BALANCER, BALANCER6]
    spec = {"type": "LoadBalancer", "externalIPs": external, "ingress": balancer}
    cluster.publish(web(*v4, v6=v6, **spec))


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("send", requests.KINDS.values(), ids=requests.KINDS)
def test_every_address(pod: Sockets, send: Send, address: str) -> None:
    """A pod reaches an endpoint, and its peer is the address that it connected to."""
    name, peer, _ = send(pod, address)
    assert name in NAMES
    assert peer == (address, PORT)


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("send", requests.KINDS.values(), ids=requests.KINDS)
def test_from_the_node(host: Sockets, send: Send, address: str) -> None:
    """A process of the node reaches the same addresses in the same way."""
    name, peer, _ = send(host, address)
    assert name in NAMES
    assert peer == (address, PORT)


@pytest.mark.parametrize("address", [VIP, EXTERNAL, BALANCER])
@pytest.mark.parametrize("send", requests.KINDS.values(), ids=requests.KINDS)
def test_mapped(pod: Sockets, send: Send, address: str) -> None:
    """An IPv6 socket reaches an IPv4 endpoint through a v4-mapped address."""
    name, peer, _ = send(pod, f"::ffff:{address}")
    assert name in NAMES
    assert peer == (f"::ffff:{address}", PORT)


@pytest.mark.parametrize("address", [VIP, VIP6])
@pytest.mark.parametrize("send", requests.KINDS.values(), ids=requests.KINDS)
def test_everyone_serves(pod: Sockets, send: Send, address: str) -> None:
    """New connections and new datagram sockets are spread over all endpoints."""
    assert requests.backends(pod, address, send=send).keys() == NAMES


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


@pytest.mark.parametrize("send", requests.KINDS.values(), ids=requests.KINDS)
def test_the_endpoint_itself(cluster: Cluster, pod: Sockets, send: Send) -> None:
    """A connection to an endpoint's own address shows that address."""
    direct = cluster.web[0].v4, 8080
    assert send(pod, *direct)[:2] == ("web-1", direct)


def test_other_ports(pod: Sockets) -> None:
    """A port of the cluster IP that is no service's is refused."""
    for send in (requests.tcp, requests.connected_udp):
        with pytest.raises(ConnectionRefusedError):
            send(pod, VIP, PORT + 1)
