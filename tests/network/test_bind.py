# SPDX-License-Identifier: Apache-2.0
"""bind() to a NodePort: fails on the node with EADDRINUSE, and is allowed in a pod."""

import os
from errno import EADDRINUSE
from socket import AF_INET6, IPPROTO_IPV6, IPV6_V6ONLY, SOCK_DGRAM, SOCK_STREAM

import pytest

from ebpflb.kernel import probe
from ebpflb.lab import manifests
from ebpflb.lab.sockets import Sockets
from tests.kit import requests
from tests.kit.cluster import NODEPORT, VIP, VIP6, Cluster, endpoint, web

pytestmark = pytest.mark.skipif(not probe.set_retval(), reason="this kernel cannot say EADDRINUSE")
KINDS = [SOCK_STREAM, SOCK_DGRAM]
TAKEN = ["0.0.0.0", "::", "127.0.0.1", "::1", "192.0.2.1", "fd02::1"]


@pytest.fixture(scope="module", autouse=True)
def service(cluster: Cluster) -> None:
    cluster.publish(web(*map(endpoint, cluster.web), nodeport=NODEPORT))


def bind(sockets: Sockets, kind: int, address: str, port: int = NODEPORT) -> int:
    """The errno, or 0."""
    with sockets.open(requests.family_of(address), kind) as opened:
        try:
            opened.bind((address, port))
        except OSError as error:
            return error.errno or -1
    return 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("address", TAKEN)
def test_on_the_node(host: Sockets, kind: int, address: str) -> None:
    """On the addresses that serve NodePorts, and on any address, the port is taken."""
    assert bind(host, kind, address) == EADDRINUSE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("address", ["0.0.0.0", "::", "127.0.0.1"])
def test_in_a_pod(pod: Sockets, kind: int, address: str) -> None:
    """A pod's ports are its own."""
    assert bind(pod, kind, address) == 0


@pytest.mark.skipif(not probe.kernel_read(), reason="no program may read the kernel's memory")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("families", [[VIP], [VIP6], [VIP, VIP6]], ids=["v4", "v6", "both"])
def test_ipv6_only(cluster: Cluster, host: Sockets, kind: int, families: list[str]) -> None:
    """A socket with IPV6_V6ONLY may have a NodePort that only IPv4 has; one without it may not."""
    named = [
        {"name": it, "port": 80, "nodePort": NODEPORT, "protocol": it} for it in ("TCP", "UDP")
    ]
    cluster.publish(manifests.service("web", families, named, type="NodePort"))
    for v6only in (True, False):
        with host.open(AF_INET6, kind) as opened:
            opened.setsockopt(IPPROTO_IPV6, IPV6_V6ONLY, int(v6only))
            if v6only and families == [VIP]:
                opened.bind(("::", NODEPORT))
            else:
                with pytest.raises(OSError, match=os.strerror(EADDRINUSE)):
                    opened.bind(("::", NODEPORT))


def test_switched_off(cluster: Cluster, host: Sockets) -> None:
    """--no-guard-nodeports leaves every bind alone, and the restart needs nothing else."""
    cluster.agent.stop()
    cluster.agent.options = ("--no-guard-nodeports",)
    cluster.agent.start()
    for address in TAKEN:
        assert bind(host, SOCK_STREAM, address) == 0
