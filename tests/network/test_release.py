# SPDX-License-Identifier: Apache-2.0
"""When all sockets are closed, no entries about them are left, and the counters agree."""

from collections.abc import Iterator

import pytest

from ebpflb.kernel.maps.readers import RememberedSockets
from ebpflb.lab.agents import wait_until
from tests.kit import requests
from tests.kit.cluster import EXTERNAL, PORT, VIP, VIP6, Cluster, endpoint, web
from tests.kit.parameters import every_kind
from tests.kit.sockets import Sockets

ALL = [VIP, VIP6, EXTERNAL]


@pytest.fixture(autouse=True)
def service(cluster: Cluster) -> Iterator[None]:
    """Publish a service; check at the end of each test that nothing is left."""
    v4, v6 = map(endpoint, cluster.web), [endpoint(pod, v6=True) for pod in cluster.web]
    cluster.publish(web(*v4, v6=v6, externalIPs=[EXTERNAL]))
    yield
    wait_until(f"all is forgotten; left: {remembered(cluster)}", lambda: not remembered(cluster))
    assert opened(cluster) > 0
    assert opened(cluster) == closed(cluster)


def remembered(cluster: Cluster) -> list[object]:
    others = (cluster.maps[name].items() for name in ("assignments", "peers"))
    return [*RememberedSockets(cluster.maps).items(), *(entry for each in others for entry in each)]


def counter(cluster: Cluster, column: int) -> int:
    stats, names = cluster.maps["backend_stats"], cluster.maps["backend_names"]
    return sum(stats.get(number)[column] for number, _ in names.items())


def opened(cluster: Cluster) -> int:
    return counter(cluster, 0)


def closed(cluster: Cluster) -> int:
    return counter(cluster, 1)


@every_kind
def test_used_sockets_are_closed(pod: Sockets, send: requests.Send) -> None:
    for address in ALL:
        send(pod, address)


def test_connection_failed(cluster: Cluster, pod: Sockets) -> None:
    """A stream socket connects again after its backend refused it."""
    gone = endpoint(cluster.client)  # a pod where no one listens
    cluster.publish(web(gone))
    with requests.tcp_socket(pod, VIP) as client:
        client.settimeout(None)  # after a failure in non-blocking mode comes ECONNABORTED
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                client.connect((VIP, PORT))
