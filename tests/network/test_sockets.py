# SPDX-License-Identifier: Apache-2.0
"""Every kind of socket reaches an endpoint through every kind of address, and sees the address.

Further subjects are the guard of NodePorts, affinity (its rules are tested in
tests/native/test_affinity.py), and the peer's name after a socket is connected again.
"""

import os
from errno import EADDRINUSE
from socket import (
    AF_INET,
    AF_INET6,
    IPPROTO_IPV6,
    IPV6_V6ONLY,
    MSG_ERRQUEUE,
    SOCK_DGRAM,
    SOCK_STREAM,
    inet_ntop,
)

import pytest

from ebpflb.kernel import probe
from ebpflb.lab import manifests
from ebpflb.lab.manifests import Manifest
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
from tests.kit.parameters import every_kind, families
from tests.kit.requests import Send
from tests.kit.sockets import Sockets

EXTERNAL6, BALANCER6 = "2001:db8::10", "2001:db8::20"
ADDRESSES = [VIP, VIP6, EXTERNAL, EXTERNAL6, BALANCER, BALANCER6]
MAPPED = [f"::ffff:{address}" for address in (VIP, EXTERNAL, BALANCER)]
NAMES = {"web-1", "web-2", "web-3"}
OF_THE_NODE = ["192.0.2.1", "fd02::1"]
KINDS = [SOCK_STREAM, SOCK_DGRAM]
ERROR_BYTES = 16  # struct sock_extended_err; a sockaddr follows


def everything(cluster: Cluster) -> list[Manifest]:
    """Return a load balancer's Service of both families with three endpoints in each."""
    v4, v6 = map(endpoint, cluster.web), [endpoint(pod, v6=True) for pod in cluster.web]
    spec = {"externalIPs": [EXTERNAL, EXTERNAL6], "ingress": [BALANCER, BALANCER6]}
    return web(*v4, v6=v6, nodeport=NODEPORT, type="LoadBalancer", **spec)


@pytest.fixture(scope="module", autouse=True)
def service(cluster: Cluster) -> None:
    cluster.publish(everything(cluster))


@pytest.mark.parametrize("address", [*ADDRESSES, *MAPPED])
@every_kind
def test_every_address(sockets: Sockets, send: Send, address: str) -> None:
    """A pod and the node reach an endpoint, also by a v4-mapped address, and their peer is the
    address that they connected to.
    """
    name, peer, _ = send(sockets, address)
    assert name in NAMES
    assert peer == (address, PORT)


@every_kind
@pytest.mark.parametrize("address", OF_THE_NODE)
def test_nodeports_reach_an_endpoint(sockets: Sockets, send: Send, address: str) -> None:
    """Pods and node reach an endpoint through the node's own address."""
    name, peer, _ = send(sockets, address, NODEPORT)
    assert name in NAMES
    assert peer == (address, NODEPORT)


@pytest.fixture
def another_service(cluster: Cluster) -> object:
    """Let a test publish other Services; the file's Service returns after it."""
    yield
    cluster.publish(everything(cluster))


guarded = pytest.mark.skipif(not probe.set_retval(), reason="this kernel cannot say EADDRINUSE")


@guarded
@pytest.mark.usefixtures("another_service")
@pytest.mark.skipif(not probe.kernel_read(), reason="no program may read the kernel's memory")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("addresses", [[VIP], [VIP6], [VIP, VIP6]], ids=["v4", "v6", "both"])
def test_ipv6_only(cluster: Cluster, host: Sockets, kind: int, addresses: list[str]) -> None:
    """A socket with IPV6_V6ONLY may bind a NodePort that only IPv4 has; a socket without it may
    not.
    """
    named = [
        {"name": it, "port": 80, "nodePort": NODEPORT, "protocol": it} for it in ("TCP", "UDP")
    ]
    cluster.publish(manifests.service("web", addresses, named, type="NodePort"))
    for v6only in (True, False):
        with host.open(AF_INET6, kind) as opened:
            opened.setsockopt(IPPROTO_IPV6, IPV6_V6ONLY, int(v6only))
            if v6only and addresses == [VIP]:
                opened.bind(("::", NODEPORT))
            else:
                with pytest.raises(OSError, match=os.strerror(EADDRINUSE)):
                    opened.bind(("::", NODEPORT))


@pytest.mark.usefixtures("another_service")
@families
def test_the_error_queue_names_the_backend(cluster: Cluster, sockets: Sockets, v6: bool) -> None:
    """With IP_RECVERR the error queue shows the backend as destination and as reporter, because no
    hook sees it.

    The error itself is ECONNREFUSED, as for the service.
    """
    pod = cluster.web[0]
    closed = [{"name": "udp", "port": TARGET + 1, "protocol": "UDP"}]
    number, address, level, option = (1, VIP6, 41, 25) if v6 else (0, VIP, 0, 11)
    where = pod.v6 if v6 else pod.v4
    cluster.publish(
        manifests.service("web", [VIP, VIP6], [{**closed[0], "port": PORT}]),
        manifests.endpoint_slice("web", "IPv4", [endpoint(pod)], closed),
        manifests.endpoint_slice("web", "IPv6", [endpoint(pod, v6=True)], closed),
    )
    with requests.udp_socket(sockets, address) as client:
        client.setsockopt(level, option, 1)
        client.sendto(b"?", (address, PORT))
        with pytest.raises(ConnectionRefusedError):
            client.recv(64)
        payload, ((_, _, said),), _, destination = client.recvmsg(64, 512, MSG_ERRQUEUE)
        assert (payload, destination[:2]) == (b"?", (where, TARGET + 1))
        offset, family = ERROR_BYTES + (8 if v6 else 4), (AF_INET, AF_INET6)[number]
        assert inet_ntop(family, said[offset : offset + (16 if v6 else 4)]) == where
