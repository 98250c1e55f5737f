# SPDX-License-Identifier: Apache-2.0
"""What a policy drops is dropped also where the address is the node's own, and a process listens.

Packets of the node to itself pass loopback, which has no hooks (kube-proxy.md 6 and 7).
"""

from collections.abc import Iterator
from typing import Any

import pytest

from ebpflb.kernel import probe
from ebpflb.lab import manifests
from tests.kit import cluster, requests
from tests.kit.cluster import Cluster
from tests.kit.lab_cluster import PORT, TARGET
from tests.kit.parameters import families
from tests.kit.sockets import Socket

BALANCER = {False: "203.0.113.20", True: "fd03:113::20"}
INTERNAL = {False: "10.96.0.30", True: "fd00:96::30"}
UNALLOCATED = {False: "10.96.200.200", True: "fd00:96::dead"}
NAMES = [{"name": p, "port": TARGET, "protocol": p.upper()} for p in ("tcp", "udp")]
PORTS = [{**name, "port": PORT} for name in NAMES]

ways = pytest.mark.parametrize("way", ["tcp", "udp", "connected-udp"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The node has all these addresses, and a process that listens on the services' port."""
    with cluster.running(tmp_path_factory.mktemp("cluster")) as it:
        for v6 in (False, True):
            for addresses in (BALANCER, INTERNAL, UNALLOCATED):
                it.node.ip(f"address add {addresses[v6]}/{128 if v6 else 32} dev lo")
        it.start_program(it.node, "serve", "local", str(PORT))
        yield it


def publish(made: Cluster, *admitted: str) -> None:
    """A balancer's address with source ranges; a service under the policy Local, elsewhere."""
    spec: dict[str, Any] = {"type": "LoadBalancer", "loadBalancerSourceRanges": admitted}
    balanced = manifests.service("web", ["10.96.0.20", "fd00:96::20"], PORTS, **spec)
    balanced["status"] = {"loadBalancer": {"ingress": [{"ip": ip} for ip in BALANCER.values()]}}
    internal: dict[str, Any] = {"internalTrafficPolicy": "Local"}
    ips = ("10.244.9.9", "fd00:244:9::9")
    elsewhere = [manifests.endpoint(ip, node="other", target="there") for ip in ips]
    slices = [
        manifests.endpoint_slice(name, f"IPv{6 if v6 else 4}", endpoints, NAMES)
        for v6 in (False, True)
        for name, endpoints in (
            ("web", [cluster.endpoint(pod, v6=v6) for pod in made.web]),
            ("internal", elsewhere[v6 : v6 + 1]),
        )
    ]
    inside = manifests.service("internal", list(INTERNAL.values()), PORTS, **internal)
    cidr = manifests.service_cidr("10.96.0.0/16", "fd00:96::/64")
    made.publish(cidr, balanced, inside, *slices)


def ask(client: Socket, way: str, where: tuple[str, int]) -> None:
    if way == "udp":
        client.sendto(b"?", where)
    else:
        client.connect(where)
        client.send(b"?")
    client.recv(64)


@ways
@families
@pytest.mark.parametrize("addresses", [BALANCER, INTERNAL, UNALLOCATED])
def test_dropped_at_an_own_address(
    made: Cluster, way: str, addresses: dict[bool, str], v6: bool
) -> None:
    """Nobody answers a process of the node, not even the one that listens at that address."""
    publish(made, "192.0.2.200/32", "fd02::200/128")
    expected: Any = TimeoutError if probe.set_retval() else ConnectionRefusedError
    if way != "tcp":
        expected = PermissionError
    make = requests.tcp_socket if way == "tcp" else requests.udp_socket
    client: Socket
    with make(made.sockets(made.node), addresses[v6]) as client, pytest.raises(expected):
        client.settimeout(0.3)
        ask(client, way, (addresses[v6], PORT))


@families
def test_udp_refused_at_an_own_address(made: Cluster, v6: bool) -> None:
    """Without endpoints a UDP connect() succeeds, and what is sent reaches no listener either."""
    balanced = manifests.service("web", ["10.96.0.20", "fd00:96::20"], PORTS, type="LoadBalancer")
    balanced["status"] = {"loadBalancer": {"ingress": [{"ip": ip} for ip in BALANCER.values()]}}
    made.publish(balanced)
    with requests.udp_socket(made.sockets(made.node), BALANCER[v6]) as client:
        client.connect((BALANCER[v6], PORT))
        assert client.getpeername()[:2] == (BALANCER[v6], PORT)
        with pytest.raises(ConnectionRefusedError):
            client.send(b"?")
            client.recv(64)
