# SPDX-License-Identifier: Apache-2.0
"""The page's rates equal the connections that were made."""

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host
from ebpflb_page import rates
from tests.kit import requests
from tests.kit.cluster import TARGET, VIP, Cluster, endpoint, web
from tests.kit.sockets import Sockets

WEB, QUIET = "default/web:tcp/TCP", "default/quiet:tcp/TCP"
QUIET_VIP, EMPTY_VIP = "10.96.0.30", "10.96.0.31"
TCP = {"name": "tcp", "port": TARGET, "protocol": "TCP"}


@pytest.fixture(autouse=True)
def published(cluster: Cluster, pods: list[Host]) -> None:
    """Publish default/web with two endpoints, default/quiet with one, default/empty with none."""
    cluster.publish(
        web(endpoint(pods[0]), endpoint(pods[1])),
        manifests.service("quiet", [QUIET_VIP], [{**TCP, "port": 80}]),
        manifests.endpoint_slice("quiet", "IPv4", [endpoint(pods[2])], [TCP]),
        manifests.service("empty", [EMPTY_VIP], [{**TCP, "port": 80}]),
    )


def test_rates_are_the_connections_that_were_made(
    cluster: Cluster, pod: Sockets, pods: list[Host]
) -> None:
    """During one second of known length, the page shows the new, refused and open connections of
    each Service and backend.
    """
    before = rates.sample(cluster.maps)
    answers = [requests.tcp(pod, VIP).name for _ in range(12)]
    answers += [requests.tcp(pod, QUIET_VIP).name for _ in range(5)]
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            requests.tcp(pod, EMPTY_VIP)
    with requests.tcp_socket(pod, QUIET_VIP) as client:
        client.connect((QUIET_VIP, 80))
        answers.append(pods[2].name)
        after = rates.sample(cluster.maps)
    rows = rates.rates(cluster.maps, before._replace(at=0.0), after._replace(at=1.0))
    services = {it.service: it for it in rows if not it.backend}
    assert len(services) == len([it for it in rows if not it.backend])
    assert [it.service for it in rows if not it.backend][:3] == [
        WEB,
        QUIET,
        "default/empty:tcp/TCP",
    ]
    assert (services[WEB].new, services[QUIET].new) == (12, 6)
    assert (services["default/empty:tcp/TCP"].new, services[WEB].refused) == (0, 0)
    assert services["default/empty:tcp/TCP"].refused == 3
    of_tcp = {it.backend: it.new for it in rows if it.backend and it.service in (WEB, QUIET)}
    assert of_tcp == {f"{host.v4}:{TARGET}": answers.count(host.name) for host in pods}
    assert services[QUIET].open == 1
