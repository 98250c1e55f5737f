# SPDX-License-Identifier: Apache-2.0
"""A datagram socket keeps its backend for a frontend as long as that serves."""

from collections.abc import Iterator
from typing import Any

import pytest

from ebpflb.lab.hosts import Host
from ebpflb.lab.sockets import Socket, Sockets
from tests.kit import requests
from tests.kit.cluster import EXTERNAL, PORT, VIP, Cluster, endpoint, web

LEAVING: dict[str, Any] = {"ready": False, "terminating": True}


@pytest.fixture
def client(pod: Sockets) -> Iterator[Socket]:
    """An unconnected socket."""
    with requests.udp_socket(pod, VIP) as opened:
        yield opened


@pytest.fixture
def kept(cluster: Cluster, client: Socket) -> Host:
    """The pod that the client keeps, of all three."""
    cluster.publish(web(*map(endpoint, cluster.web), externalIPs=[EXTERNAL]))
    name = requests.exchange(client, VIP).name
    return next(pod for pod in cluster.web if pod.name == name)


@pytest.fixture
def others(cluster: Cluster, kept: Host) -> list[Host]:
    return [pod for pod in cluster.web if pod is not kept]


def same(client: Socket, times: int = 20) -> str:
    """The one backend that answers every time."""
    (name,) = {requests.exchange(client, VIP).name for _ in range(times)}
    return name


def test_moves_when_gone(cluster: Cluster, client: Socket, kept: Host, others: list[Host]) -> None:
    """When its backend is gone it moves, and keeps the new one."""
    cluster.publish(web(*map(endpoint, others)))
    assert same(client) in {pod.name for pod in others}


def test_stays_while_leaving(
    cluster: Cluster, client: Socket, kept: Host, others: list[Host]
) -> None:
    """A backend that terminates but still serves keeps the sockets that it has, and gets no new."""
    cluster.publish(web(endpoint(kept, **LEAVING), *map(endpoint, others)))
    assert same(client) == kept.name
    found = requests.backends(client.sockets, VIP, send=requests.udp)
    assert found.keys() == {pod.name for pod in others}


def test_each_frontend(client: Socket, kept: Host) -> None:
    """One socket may use several frontends: each keeps its backend and shows its own address."""
    first = {address: requests.exchange(client, address) for address in (VIP, EXTERNAL)}
    for address, answer in first.items():
        assert requests.exchange(client, address) == answer
        assert answer.peer == (address, PORT)
