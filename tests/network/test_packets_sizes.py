# SPDX-License-Identifier: Apache-2.0
"""Packets of any size: fragments, large segments, and a bottleneck on the path.

With netfilter the pods are routed: at a bridge the kernel forgets how small fragments must be
(test_bridged_pods). test_packets_setups tests other packets with netfilter on a bridge.
"""

import subprocess
from collections.abc import Iterator
from errno import EMSGSIZE
from typing import Any

import pytest

from ebpflb.lab import cni
from ebpflb.lab.agents import wait_until
from ebpflb.lab.router import NODES, OUTSIDE
from ebpflb.model.packet_path import Engine
from tests.kit import requests, two_nodes
from tests.kit.parameters import families
from tests.kit.pod_networks import Routed
from tests.kit.sockets import Socket
from tests.kit.two_nodes import CLUSTER_CIDR, Frontends, TwoNodes, address

NETWORKS: dict[Engine, cni.Cni] = {Engine.FLOWS: cni.Bridge(), Engine.NETFILTER: Routed()}
NARROW = 1280  # bytes, the least that IPv6 allows
HERE, THERE = Frontends(10), Frontends(20)
IP_MTU_DISCOVER, IP_PMTUDISC_DO, IPV6_MTU_DISCOVER = 10, 2, 23  # linux/in.h, linux/in6.h
IPPROTO_IP, IPPROTO_IPV6 = 0, 41

Place = tuple[str, int]

endpoints = pytest.mark.parametrize("frontends", [HERE, THERE], ids=["here", "there"])


@pytest.fixture(scope="module", params=NETWORKS, ids=str)
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    engine = request.param
    network = NETWORKS[engine]
    two_nodes.require(engine, network)
    folder = tmp_path_factory.mktemp("two")
    with two_nodes.running(folder, *CLUSTER_CIDR, network=network, engine=engine) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def services(two: TwoNodes) -> None:
    """Return a Service for each endpoint."""
    two.publish(two.service("here", 10, two.here), two.service("there", 20, two.there))


def limit_packets(two: TwoNodes, mtu: int) -> None:
    """Limit the size of packets at the router, by routes that precede the kernel's own."""
    for segment in (NODES, OUTSIDE):
        v4, v6 = segment.networks
        for network in (v4, f"{v6} metric 256"):
            two.lab.router.ip(f"route replace {network} dev {segment.name} mtu lock {mtu}")


@pytest.fixture
def narrow(two: TwoNodes) -> Iterator[int]:
    """Set the smallest possible MTU between nodes and outside."""
    limit_packets(two, NARROW)
    yield NARROW
    limit_packets(two, 1500)
    for host in (two.outside, two.here, two.there, two.near, two.far):
        host.ip("route flush cache")
        host.ip("route flush cache", v6=True)


@pytest.fixture
def where(two: TwoNodes, frontends: Frontends, v6: bool) -> Place:
    """Return the NodePort of the endpoint."""
    return frontends.to("nodeport", two.near, v6=v6)


@pytest.fixture
def client(two: TwoNodes, where: Place) -> Iterator[Socket]:
    """Return a datagram socket outside."""
    with requests.udp_socket(two.sockets(two.outside), where[0]) as opened:
        yield opened


@families
@endpoints
def test_answers_through_a_bottleneck(
    two: TwoNodes, narrow: int, client: Socket, where: Place, frontends: Frontends, v6: bool
) -> None:
    """An endpoint whose answer is too long gets the ICMP error, and its next answers arrive."""
    client.settimeout(0.2)
    wait_until("an answer comes", lambda: answered(client, where))
    assert path_mtu(two, frontends, v6=v6) == narrow


@families
@endpoints
def test_questions_through_a_bottleneck(
    narrow: int, client: Socket, where: Place, v6: bool
) -> None:
    """A client that forbids fragmentation gets the ICMP error."""
    forbid_fragments(client, v6)
    client.connect(where)
    with pytest.raises(OSError) as caught:
        for _ in range(3):
            client.send(bytes(narrow))
            client.recv(narrow)
    assert caught.value.errno == EMSGSIZE


def answered(client: Socket, where: tuple[str, int]) -> bool:
    """Ask with a datagram that just fits; the answer is a line longer."""
    headers = 40 + 8 if ":" in where[0] else 20 + 8
    client.sendto(bytes(NARROW - headers), where)
    try:
        return bool(client.recv(2 * NARROW))
    except TimeoutError:
        return False


def forbid_fragments(client: Socket, v6: bool) -> None:
    level, option = (IPPROTO_IPV6, IPV6_MTU_DISCOVER) if v6 else (IPPROTO_IP, IP_MTU_DISCOVER)
    client.setsockopt(level, option, IP_PMTUDISC_DO)


def path_mtu(two: TwoNodes, frontends: Frontends, *, v6: bool) -> int:
    """Return the endpoint's path MTU to the client address that it sees; 0: none."""
    pod, client = (two.here, two.outside) if frontends is HERE else (two.there, two.near)
    words = ["ip", "-o", "route", "get", address(client, "::" if v6 else "")]
    said = pod.start(words, stdout=subprocess.PIPE).communicate()[0].split()
    return int(said[said.index("mtu") + 1]) if "mtu" in said else 0
