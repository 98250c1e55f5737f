# SPDX-License-Identifier: Apache-2.0
"""getpeername and recvfrom name whom a socket is connected to now, never its former frontend."""

import pytest

from ebpflb.lab.sockets import Sockets
from tests.kit import requests
from tests.kit.cluster import PORT, TARGET, VIP, VIP6, Cluster
from tests.kit.stale_udp import connect, dual_stack_web

SERVICES = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])


@pytest.fixture(autouse=True)
def one_backend(cluster: Cluster) -> None:
    cluster.publish(dual_stack_web(cluster.web[0]))


@SERVICES
def test_udp_connected_to_the_backend_itself(cluster: Cluster, sockets: Sockets, v6: bool) -> None:
    """A UDP socket that is connected to its backend anew hears that backend."""
    vip, pod = (VIP6, cluster.web[0].v6) if v6 else (VIP, cluster.web[0].v4)
    with requests.udp_socket(sockets, vip) as client:
        assert connect(client, vip).peer == (vip, PORT)
        assert connect(client, pod, TARGET).peer == (pod, TARGET)
        assert client.getpeername()[:2] == (pod, TARGET)
        assert connect(client, vip).peer == (vip, PORT)
        assert client.getpeername()[:2] == (vip, PORT)


@SERVICES
def test_udp_disconnected(cluster: Cluster, sockets: Sockets, v6: bool) -> None:
    """After connect() to AF_UNSPEC the backend is the backend, and the service the service."""
    vip, pod = (VIP6, cluster.web[0].v6) if v6 else (VIP, cluster.web[0].v4)
    with requests.udp_socket(sockets, vip) as client:
        assert connect(client, vip).peer == (vip, PORT)
        client.disconnect()
        assert requests.exchange(client, pod, TARGET).peer == (pod, TARGET)
        assert requests.exchange(client, vip).peer == (vip, PORT)


def test_tcp_connected_to_the_backend_itself(cluster: Cluster, sockets: Sockets) -> None:
    """Nor does a TCP socket that is used for another connection name the former frontend."""
    pod = cluster.web[0]
    with requests.tcp_socket(sockets, VIP) as client:
        client.connect((VIP, PORT))
        assert client.getpeername() == (VIP, PORT)
        client.disconnect()
        client.connect((pod.v4, TARGET))
        assert client.getpeername() == (pod.v4, TARGET)
