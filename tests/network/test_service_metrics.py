# SPDX-License-Identifier: Apache-2.0
"""The series of a Service equal its clients' connections (docs/metrics.md)."""

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ebpflb.model.packet_path import Engine
from tests.kit import requests
from tests.kit.cluster import NODEPORT, VIP, VIP6, ServingOutside, endpoint, serving_outside, web
from tests.kit.two_nodes import require

Series = dict[tuple[str, ...], float]


@pytest.fixture(scope="module", params=list(Engine), ids=str)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServingOutside]:
    require(request.param)
    folder = tmp_path_factory.mktemp("series")
    with serving_outside(folder, request.param, "--service-metrics", "9") as made:
        v6 = [endpoint(pod, v6=True) for pod in made.web]
        made.publish(web(*map(endpoint, made.web), v6=v6, nodeport=NODEPORT))
        yield made


def series(cluster: ServingOutside, what: str) -> Series:
    """Return the value by Service, port and protocol."""
    wanted = f"ebpflb_service_{what}"
    found: Series = {}
    for metric in text_string_to_metric_families("\n".join(cluster.metrics()) + "\n"):
        for sample in metric.samples:
            if sample.name == wanted:
                words = sample.labels
                assert words["namespace"] == "default"
                found[words["name"], words["port"], words["protocol"]] = sample.value
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
