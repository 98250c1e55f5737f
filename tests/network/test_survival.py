# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to endpoints and agent: connections that are open live on, new ones land."""

import signal
from collections.abc import Iterator

import pytest

from ebpflb.datapath.attach import cgroup_links
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.lab.sockets import Socket, Sockets
from tests.kit import requests
from tests.kit.cluster import PORT, VIP, Cluster, endpoint, web

pytestmark = pytest.mark.usefixtures("started_anew")


@pytest.fixture(autouse=True)
def service(cluster: Cluster) -> None:
    cluster.publish(web(*map(endpoint, cluster.web)))


@pytest.fixture
def connection(service: None, pod: Sockets) -> Iterator[Socket]:
    """Open before the test, and alive after it."""
    with requests.tcp_socket(pod, VIP) as client:
        client.connect((VIP, PORT))
        client.recv(64)
        yield client
        client.send(b"still there?")
        assert client.recv(64) == b"still there?"
        assert client.getpeername() == (VIP, PORT)


def lands(pod: Sockets) -> bool:
    return all(
        len(requests.backends(pod, VIP, send=send)) == 3 for send in (requests.tcp, requests.udp)
    )


def programs(cluster: Cluster) -> dict[str, int]:
    return cgroup_links.attached(StateDir(cluster.agent.paths.state))


def test_endpoints_leave(cluster: Cluster, connection: Socket, pod: Sockets) -> None:
    """All endpoints leave the service, and then the service goes."""
    cluster.publish(web())
    with pytest.raises(ConnectionRefusedError):
        requests.tcp(pod, VIP)
    cluster.publish()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_agent_ends(
    cluster: Cluster, connection: Socket, pod: Sockets, how: signal.Signals
) -> None:
    """Without an agent the hooks serve as before; a new agent goes on from there."""
    before = programs(cluster)
    cluster.agent.stop(how)
    assert programs(cluster) == before
    assert lands(pod)
    cluster.agent.start()
    assert lands(pod)


def test_programs_are_replaced(cluster: Cluster, connection: Socket, pod: Sockets) -> None:
    """A restart puts its own programs in the place of the old ones, hook by hook."""
    before = programs(cluster)
    cluster.agent.stop()
    cluster.agent.start()
    after = programs(cluster)
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())


def test_restart_under_load(cluster: Cluster) -> None:
    """While agents come and go no connection fails."""
    pressing = [
        cluster.start_client(cluster.client, protocol, VIP, pause=0.005)
        for protocol in ("tcp", "udp")
    ]
    for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        cluster.agent.stop(how)
        cluster.agent.start()
    for said in map(cluster.stop_client, pressing):
        assert not said["errors"]
        assert len(said["names"]) == 3


def test_changed_while_away(cluster: Cluster, pod: Sockets) -> None:
    """What changed while no agent was there is in force when one is back."""
    cluster.agent.stop(signal.SIGKILL)
    cluster.publish(web(endpoint(cluster.web[1])))
    assert lands(pod)
    cluster.agent.start()
    assert requests.backends(pod, VIP).keys() == {"web-2"}
