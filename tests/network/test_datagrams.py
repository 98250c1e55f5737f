# SPDX-License-Identifier: Apache-2.0
"""A datagram socket keeps its backend for a frontend as long as that serves."""

from collections.abc import Iterator

import pytest

from ebpflb.lab.hosts import Host
from ebpflb.lab.sockets import Socket, Sockets
from tests.network import asking
from tests.network.cluster import EXTERNAL, PORT, VIP, Cluster, at, web

LEAVING = {"ready": False, "terminating": True}


@pytest.fixture
def client(pod: Sockets) -> Iterator[Socket]:
    """An unconnected socket."""
    with asking.datagram(pod, VIP) as opened:
        yield opened


@pytest.fixture
def kept(cluster: Cluster, client: Socket) -> Host:
    """The pod that the client keeps, of all three."""
    cluster.publish(web(*map(at, cluster.web), externalIPs=[EXTERNAL]))
    name = asking.again(client, VIP).name
    return next(pod for pod in cluster.web if pod.name == name)


@pytest.fixture
def others(cluster: Cluster, kept: Host) -> list[Host]:
    return [pod for pod in cluster.web if pod is not kept]


def same(client: Socket, times: int = 20) -> str:
    """Who answers every time."""
    (name,) = {asking.again(client, VIP).name for _ in range(times)}
    return name


def test_keeps(client: Socket, kept: Host) -> None:
    """Datagram after datagram goes to the first one's backend."""
    assert same(client) == kept.name


def test_while_others_go(cluster: Cluster, client: Socket, kept: Host) -> None:
    """It does not matter that the other endpoints leave."""
    cluster.publish(web(at(kept)))
    assert same(client) == kept.name


def test_while_others_come(
    cluster: Cluster, client: Socket, kept: Host, others: list[Host]
) -> None:
    """It does not matter that other endpoints come, before it in the list or after."""
    cluster.publish(web(at(kept)))
    cluster.publish(web(at(others[0]), at(kept), at(others[1])))
    assert same(client) == kept.name


def test_moves_when_gone(cluster: Cluster, client: Socket, kept: Host, others: list[Host]) -> None:
    """When its backend is gone it moves, and keeps the new one."""
    cluster.publish(web(*map(at, others)))
    assert same(client) in {pod.name for pod in others}


def test_stays_while_leaving(
    cluster: Cluster, client: Socket, kept: Host, others: list[Host]
) -> None:
    """A backend that terminates but still serves keeps the sockets that it has, and gets no new."""
    cluster.publish(web(at(kept, **LEAVING), *map(at, others)))
    assert same(client) == kept.name
    found = asking.names(client.sockets, VIP, ask=asking.udp)
    assert found.keys() == {pod.name for pod in others}


def test_moves_when_it_serves_no_more(
    cluster: Cluster, client: Socket, kept: Host, others: list[Host]
) -> None:
    """A backend that terminates and does not serve keeps nobody."""
    cluster.publish(web(at(kept, **LEAVING, serving=False), *map(at, others)))
    assert same(client) in {pod.name for pod in others}


def test_each_frontend(client: Socket, kept: Host) -> None:
    """One socket may use several frontends: each keeps its backend and shows its own address."""
    first = {address: asking.again(client, address) for address in (VIP, EXTERNAL)}
    for address, answer in first.items():
        assert asking.again(client, address) == answer
        assert answer.peer == (address, PORT)


def test_each_socket(cluster: Cluster, kept: Host, pod: Sockets) -> None:
    """Every socket chooses for itself."""
    assert len(asking.names(pod, VIP, ask=asking.udp)) == 3


def test_connected_again(client: Socket, kept: Host) -> None:
    """A socket connected, used and connected elsewhere shows each time where it asked."""
    for address in (VIP, EXTERNAL, VIP):
        client.connect((address, PORT))
        client.send(b"?")
        assert client.recvfrom(64)[1] == client.getpeername() == (address, PORT)


@pytest.mark.parametrize("connect", [True, False])
def test_endpoint_asked_directly(
    client: Socket, kept: Host, others: list[Host], connect: bool
) -> None:
    """An endpoint asked by its own address answers with it, though the socket uses the service."""
    direct = (others[0].v4, 8080)
    if connect:
        client.connect(direct)
        client.send(b"?")
    else:
        client.sendto(b"?", direct)
    answer = asking.receive(client)
    assert (answer.name, answer.peer) == (others[0].name, direct)
