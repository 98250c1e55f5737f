# SPDX-License-Identifier: Apache-2.0
"""getpeername and recvfrom name whom a socket is connected to now, never its former frontend."""

from socket import AF_INET, AF_INET6, MSG_ERRQUEUE, inet_ntop

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.sockets import Sockets
from tests.kit import requests
from tests.kit.cluster import PORT, TARGET, VIP, VIP6, Cluster, endpoint
from tests.kit.stale_udp import connect, dual_stack_web

ERROR_BYTES = 16  # struct sock_extended_err; a sockaddr follows
SERVICES = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])


@pytest.fixture(autouse=True)
def one_backend(cluster: Cluster) -> None:
    cluster.publish(dual_stack_web(cluster.web[0]))


@SERVICES
def test_udp_disconnected(cluster: Cluster, sockets: Sockets, v6: bool) -> None:
    """After connect() to AF_UNSPEC the backend is the backend, and the service the service."""
    vip, pod = (VIP6, cluster.web[0].v6) if v6 else (VIP, cluster.web[0].v4)
    with requests.udp_socket(sockets, vip) as client:
        assert connect(client, vip).peer == (vip, PORT)
        client.disconnect()
        assert requests.exchange(client, pod, TARGET).peer == (pod, TARGET)
        assert requests.exchange(client, vip).peer == (vip, PORT)


@SERVICES
def test_tcp_connected_to_the_backend_itself(cluster: Cluster, sockets: Sockets, v6: bool) -> None:
    """Nor does a TCP socket that is used for another connection name the former frontend."""
    vip, pod = (VIP6, cluster.web[0].v6) if v6 else (VIP, cluster.web[0].v4)
    with requests.tcp_socket(sockets, vip) as client:
        client.connect((vip, PORT))
        assert client.getpeername()[:2] == (vip, PORT)
        client.disconnect()
        with pytest.raises(OSError, match="not connected"):
            client.getpeername()
        client.connect((pod, TARGET))
        assert client.getpeername()[:2] == (pod, TARGET)


@SERVICES
def test_the_error_queue_names_the_backend(cluster: Cluster, sockets: Sockets, v6: bool) -> None:
    """With IP_RECVERR: as whom the datagram was for, and as who reports the error; no hook sees it.

    The error itself is the service's as well, ECONNREFUSED.
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
