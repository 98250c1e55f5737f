# SPDX-License-Identifier: Apache-2.0
"""Session affinity by client: a pod, or the node. Time passes by hand, in the map.

tests/native/test_affinity.py has every rule.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Sockets
from tests.kit import requests
from tests.kit.cluster import EXTERNAL, NODEPORT, VIP, Cluster, endpoint, web
from tests.kit.parameters import every_kind
from tests.kit.requests import Send

SECONDS = 30  # more than a test takes, less than the machine is up
WITH_AFFINITY: dict[str, Any] = {
    "sessionAffinity": "ClientIP",
    "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": SECONDS}},
}


def web_with_affinity(*endpoints: Manifest) -> list[Manifest]:
    return web(*endpoints, nodeport=NODEPORT, externalIPs=[EXTERNAL], **WITH_AFFINITY)


@pytest.fixture(autouse=True)
def service(cluster: Cluster) -> Iterator[None]:
    """Not before the machine is up for so long that time can be turned back."""
    wait_until("the machine is up for long enough", lambda: time.monotonic() > 2 * SECONDS)
    cluster.publish(web_with_affinity(*map(endpoint, cluster.web)))
    yield
    cluster.publish()  # the next test's service is another, whom nobody remembers


@pytest.fixture
def home(cluster: Cluster, pod: Sockets) -> Host:
    """The pod on which the client is at home."""
    name = requests.tcp(pod, VIP).name
    return next(host for host in cluster.web if host.name == name)


def pass_time(cluster: Cluster, part: float) -> None:
    """Every memory is older by this part of the timeout."""
    affinity, step = cluster.maps["affinity"], int(part * SECONDS * 1e9)
    aged = [(c, e._replace(last_used=max(0, e.last_used - step))) for c, e in affinity.items()]
    affinity.write(aged)


def counts(cluster: Cluster) -> tuple[int, int]:
    """The counters ``chosen`` and ``by_affinity`` of the service."""
    stats, names = cluster.maps["service_stats"], cluster.maps["service_names"]
    found = [stats.get(i)[:2] for i, name in names.items() if name.service == "web"]
    chosen, by_affinity = (sum(column) for column in zip(*found, strict=True))
    return chosen, by_affinity


@every_kind
def test_sticks(cluster: Cluster, pod: Sockets, send: Send) -> None:
    """One client comes to one endpoint with every connection and every new datagram socket, by all
    addresses of the service's port.
    """
    (name,) = requests.backends(pod, VIP, send=send)
    assert send(pod, EXTERNAL).name == name
    assert send(pod, cluster.node.v4, NODEPORT).name == name


def test_clients_differ(cluster: Cluster) -> None:
    """Pods and the node are clients of their own."""
    hosts = [cluster.node, cluster.client, *cluster.web]
    for host in hosts:
        requests.tcp(cluster.sockets(host), VIP)
    clients = [client for client, _ in cluster.maps["affinity"].items()]
    assert len({client.netns for client in clients}) == len(hosts)
    assert counts(cluster) == (len(hosts), 0)


def test_ends(cluster: Cluster, pod: Sockets, home: Host) -> None:
    """The timeout begins with every connection; after it the next one is balanced afresh."""
    for _ in range(2):
        pass_time(cluster, 0.6)
        assert requests.tcp(pod, VIP).name == home.name
    pass_time(cluster, 1.1)
    requests.tcp(pod, VIP)
    assert counts(cluster) == (4, 2)


def test_off_and_on(cluster: Cluster, pod: Sockets, home: Host) -> None:
    """Switched off, traffic spreads at once; switched on, it sticks at once."""
    cluster.publish(web(*map(endpoint, cluster.web)))
    assert len(requests.backends(pod, VIP)) == 3
    cluster.publish(web_with_affinity(*map(endpoint, cluster.web)))
    assert len(requests.backends(pod, VIP)) == 1
