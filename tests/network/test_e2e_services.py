# SPDX-License-Identifier: Apache-2.0
"""What Kubernetes' e2e tests require of a proxy, within one node."""

import subprocess
from pathlib import Path

from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host
from tests.kit import requests
from tests.kit.cluster import NODEPORT, TARGET, VIP, VIP6, Cluster, endpoint, web
from tests.kit.sockets import CALL_SECONDS, Sockets

A_MOMENT = 0.3  # seconds after which no one is going to answer
HOST_PORT, HOST_UDP_PORT = 10180, 10181


def up(sockets: Sockets, *pods: str, host: str = VIP, port: int = 80) -> None:
    """Let only these endpoints answer."""
    assert requests.backends(sockets, host, port=port).keys() == set(pods)


def reaches(sockets: Sockets, host: str, port: int, *, is_up: bool = True) -> bool:
    """Whether a connection opens; only if it should (``is_up``) is the wait long."""
    with requests.tcp_socket(sockets, host) as client:
        client.settimeout(CALL_SECONDS if is_up else A_MOMENT)
        try:
            client.connect((host, port))
        except OSError:
            return False
        return True


def test_each_type_of_service_is_programmed(
    cluster: Cluster, sockets: Sockets, pods: list[Host]
) -> None:
    """A Service that becomes ExternalName, ClusterIP and NodePort in turn is programmed after each
    change.
    """
    alias = web(endpoint(pods[0]), type="ExternalName", externalName="example.org")
    node = cluster.node.v4
    for published, cluster_ip, nodeport in (
        (alias, False, False),
        (web(endpoint(pods[0])), True, False),
        (web(endpoint(pods[0]), nodeport=NODEPORT), True, True),
        (alias, False, False),
        (web(endpoint(pods[0]), nodeport=NODEPORT), True, True),
        (web(endpoint(pods[0])), True, False),
    ):
        cluster.publish(published)
        assert reaches(sockets, VIP, 80, is_up=cluster_ip) is cluster_ip
        assert reaches(sockets, node, NODEPORT, is_up=nodeport) is nodeport


def test_route_localnet(cluster: Cluster, host: Sockets, pods: list[Host]) -> None:
    """NodePorts are served on the node's loopback without setting route_localnet."""
    cluster.publish(web(endpoint(pods[0]), nodeport=NODEPORT))
    up(host, "web-1", host="127.0.0.1", port=NODEPORT)
    sysctl = ["cat", "/proc/sys/net/ipv4/conf/all/route_localnet"]
    reading = cluster.lab.keep(cluster.node.start(sysctl, stdout=subprocess.PIPE))
    assert reading.communicate()[0] == "0\n"


def test_host_network_endpoint(cluster: Cluster, sockets: Sockets) -> None:
    """An endpoint that is the node itself answers pods and processes, under policy Local."""
    host_network(cluster)
    cluster.start_program(cluster.node, "serve", "the-node", str(HOST_PORT))
    up(sockets, "the-node")
    up(sockets, "the-node", host=cluster.node.v4, port=NODEPORT)


def test_host_network_endpoint_by_udp(cluster: Cluster, sockets: Sockets, host: Sockets) -> None:
    """A UDP server on the node answers too; it answers from the address that was asked."""
    host_network(cluster)
    with requests.udp_socket(host, VIP) as server, requests.udp_socket(sockets, VIP) as client:
        server.bind((cluster.node.v4, HOST_UDP_PORT))
        for where in ((VIP, 80), (cluster.node.v4, NODEPORT)):
            client.sendto(b"?", where)
            _, peer = server.recvfrom(64)
            server.sendto(b"the-node ", peer)
            assert client.recvfrom(64) == (b"the-node ", where)


def host_network(cluster: Cluster) -> None:
    """Make the node itself the only endpoint."""
    endpoint = manifests.endpoint(cluster.node.v4, node="node", target="the-node")
    listed = [
        {"name": "tcp", "port": HOST_PORT, "protocol": "TCP"},
        {"name": "udp", "port": HOST_UDP_PORT, "protocol": "UDP"},
    ]
    service, *_ = web(nodeport=NODEPORT, internalTrafficPolicy="Local")
    cluster.publish(service, manifests.endpoint_slice("web", "IPv4", [endpoint], listed))


def test_sctp_service(cluster: Cluster, pods: list[Host]) -> None:
    """An SCTP service is programmed without loading the protocol into the kernel."""
    before = protocols()
    sctp = [{"name": "s", "port": 80, "protocol": "SCTP"}]
    cluster.publish(
        manifests.service("web", [VIP, VIP6], sctp),
        manifests.endpoint_slice("web", "IPv4", [endpoint(pods[0])], [{**sctp[0], "port": TARGET}]),
    )
    found = {(str(it), it.protocol) for it, _ in cluster.maps["services"].items()}
    assert (f"{VIP}:80", 132) in found
    assert protocols() == before


def protocols() -> set[str]:
    """Return the protocols that the kernel has sockets for."""
    return {line.split()[0] for line in Path("/proc/net/protocols").read_text().splitlines()}
