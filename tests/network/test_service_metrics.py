# SPDX-License-Identifier: Apache-2.0
"""The series of a Service equal its clients' connections (docs/metrics.md)."""

from collections.abc import Iterator
from socket import AF_INET, SOCK_DGRAM

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.manifests import Manifest
from ebpflb.model.packet_path import Engine
from tests.kit import requests
from tests.kit.cluster import NODEPORT, VIP, VIP6, ServingOutside, endpoint, serving_outside, web
from tests.kit.lab_cluster import PORT, TARGET
from tests.kit.two_nodes import require

EMPTY, EMPTY_NODEPORT = "10.96.0.31", 30081
ELSEWHERE, ELSEWHERE_NODEPORT = "10.96.0.32", 30082
Series = dict[tuple[str, ...], float]


@pytest.fixture(scope="module", params=list(Engine), ids=str)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServingOutside]:
    require(request.param)
    folder = tmp_path_factory.mktemp("series")
    with serving_outside(folder, request.param, "--service-metrics", "9") as made:
        made.publish(*services(made))
        yield made


def services(cluster: ServingOutside) -> list[Manifest]:
    """Publish default/web with three endpoints, a Service without any, and a Service with one on
    another node.
    """
    v6 = [endpoint(pod, v6=True) for pod in cluster.web]
    udp = {"name": "udp", "protocol": "UDP"}
    away = [endpoint(cluster.web[0], node="another")]
    return [
        *web(*map(endpoint, cluster.web), v6=v6, nodeport=NODEPORT),
        manifests.service(
            "empty",
            [EMPTY],
            [{"name": "tcp", "port": PORT, "nodePort": EMPTY_NODEPORT, "protocol": "TCP"}],
            type="NodePort",
            labels={"metrics": "on"},
        ),
        manifests.service(
            "elsewhere",
            [ELSEWHERE],
            [{**udp, "port": PORT, "nodePort": ELSEWHERE_NODEPORT}],
            type="NodePort",
            externalTrafficPolicy="Local",
        ),
        manifests.endpoint_slice("elsewhere", "IPv4", away, [{**udp, "port": TARGET}]),
    ]


def series(cluster: ServingOutside, what: str) -> Series:
    """Return the value by Service, port and protocol, and verdict."""
    wanted = f"ebpflb_service_{what}"
    found: Series = {}
    for metric in text_string_to_metric_families("\n".join(cluster.metrics()) + "\n"):
        for sample in metric.samples:
            if sample.name == wanted:
                words = sample.labels
                assert words["namespace"] == "default"
                more = [words[key] for key in ("verdict",) if key in words]
                found[words["name"], words["port"], words["protocol"], *more] = sample.value
    return found


def test_connections_are_counted_where_they_are_chosen(cluster: ServingOutside) -> None:
    """Connections of a pod's sockets and packets from outside are counted exactly, in both
    families.
    """
    pod, outside = cluster.sockets(cluster.client), cluster.sockets(cluster.outside)
    assert series(cluster, "connections_total")["web", "tcp", "TCP"] == 0
    for address, times in ((VIP, 5), (VIP6, 3)):
        for _ in range(times):
            requests.tcp(pod, address)
    for address, times in ((cluster.node.v4, 4), (cluster.node.v6, 2)):
        for _ in range(times):
            requests.tcp(outside, address, NODEPORT)
    with requests.udp_socket(outside, VIP) as client:
        for _ in range(6):
            requests.exchange(client, cluster.node.v4, NODEPORT)
    requests.udp(pod, VIP)
    found = series(cluster, "connections_total")
    assert found["web", "tcp", "TCP"] == 5 + 3 + 4 + 2
    assert found["web", "udp", "UDP"] == 2  # flows, not datagrams
    assert not any(series(cluster, "refused_total").values())


def test_refusals_are_counted_by_their_verdict(cluster: ServingOutside) -> None:
    """Requests without any endpoint are counted as refused, for a socket and for a packet; without
    an endpoint on this node, under policy Local, as dropped.
    """
    before = series(cluster, "connections_total")
    for sockets, where in (
        (cluster.sockets(cluster.client), (EMPTY, PORT)),
        (cluster.sockets(cluster.outside), (cluster.node.v4, EMPTY_NODEPORT)),
    ):
        with pytest.raises(ConnectionRefusedError):
            requests.tcp(sockets, *where)
    with cluster.sockets(cluster.outside).open(AF_INET, SOCK_DGRAM) as client:
        client.sendto(b"?", (cluster.node.v4, ELSEWHERE_NODEPORT))
    local = "elsewhere", "udp", "UDP", "no_local_endpoint"
    wait_until("the datagram was dropped", lambda: series(cluster, "refused_total")[local] == 1)
    found = series(cluster, "refused_total")
    assert {key: value for key, value in found.items() if value} == {
        ("empty", "tcp", "TCP", "refused"): 2,
        local: 1,
    }
    assert series(cluster, "connections_total") == before
