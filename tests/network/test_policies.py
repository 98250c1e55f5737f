# SPDX-License-Identifier: Apache-2.0
"""Which endpoints a connection may come to: traffic policies, zones, conditions."""

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host
from ebpflb.lab.sockets import Sockets
from tests.kit import requests
from tests.kit.cluster import EXTERNAL, NODEPORT, TARGET, VIP, VIP6, Cluster, endpoint, web

LEAVING = {"ready": False, "terminating": True}
ZONE = "topology.kubernetes.io/zone"


def test_internal_local(cluster: Cluster, sockets: Sockets, pods: list[Host]) -> None:
    """Under the internal policy Local the cluster IP selects this node's endpoints only."""
    endpoints = endpoint(pods[0]), endpoint(pods[1], node="other"), endpoint(pods[2], node="other")
    cluster.publish(web(*endpoints, internalTrafficPolicy="Local", externalIPs=[EXTERNAL]))
    assert requests.backends(sockets, VIP).keys() == {"web-1"}
    assert len(requests.backends(sockets, EXTERNAL)) == 3


def test_external_local(cluster: Cluster, sockets: Sockets, pods: list[Host]) -> None:
    """Under the external policy Local pods and node still come to all endpoints."""
    endpoints = endpoint(pods[0]), endpoint(pods[1], node="other"), endpoint(pods[2], node="other")
    spec = {"externalTrafficPolicy": "Local", "externalIPs": [EXTERNAL]}
    cluster.publish(web(*endpoints, nodeport=NODEPORT, **spec))
    for address, port in ((VIP, 80), (EXTERNAL, 80), (cluster.node.v4, NODEPORT)):
        assert len(requests.backends(sockets, address, port=port)) == 3


def test_zones(cluster: Cluster, pod: Sockets, pods: list[Host]) -> None:
    """Zone hints keep traffic in the node's zone, once the Node has a zone label."""
    hinted = [
        endpoint(pods[0], zones=["a"]),
        endpoint(pods[1], zones=["b"]),
        endpoint(pods[2], zones=["a"]),
    ]
    cluster.publish(web(*hinted))
    assert len(requests.backends(pod, VIP)) == 3
    node = manifests.node("node", cluster.node.v4, cluster.node.v6)
    node["metadata"]["labels"] = {ZONE: "a"}
    cluster.publish(node, web(*hinted))
    assert requests.backends(pod, VIP).keys() == {"web-1", "web-3"}


def test_zone_without_endpoint(cluster: Cluster, pod: Sockets, pods: list[Host]) -> None:
    """Where no endpoint is for our zone, all serve."""
    node = manifests.node("node", cluster.node.v4, cluster.node.v6)
    node["metadata"]["labels"] = {ZONE: "c"}
    cluster.publish(node, web(endpoint(pods[0], zones=["a"]), endpoint(pods[1], zones=["b"])))
    assert requests.backends(pod, VIP).keys() == {"web-1", "web-2"}


def test_ready_first(cluster: Cluster, pod: Sockets, pods: list[Host]) -> None:
    """New connections come to ready endpoints as long as there are any."""
    cluster.publish(
        web(endpoint(pods[0], **LEAVING), endpoint(pods[1]), endpoint(pods[2], ready=False))
    )
    assert requests.backends(pod, VIP).keys() == {"web-2"}


def test_leaving_last(cluster: Cluster, pod: Sockets, pods: list[Host]) -> None:
    """With none ready, those that are leaving and still serve take over."""
    gone = endpoint(pods[2], **LEAVING, serving=False)
    cluster.publish(web(endpoint(pods[0], **LEAVING), endpoint(pods[1], **LEAVING), gone))
    assert requests.backends(pod, VIP).keys() == {"web-1", "web-2"}


@pytest.mark.parametrize("address", [VIP, VIP6])
@pytest.mark.parametrize("send", requests.KINDS.values(), ids=requests.KINDS)
def test_hairpin(cluster: Cluster, pods: list[Host], send: requests.Send, address: str) -> None:
    """A pod reaches itself through its own service."""
    cluster.publish(web(endpoint(pods[0]), v6=[endpoint(pods[0], v6=True)]))
    assert send(cluster.sockets(pods[0]), address)[:2] == ("web-1", (address, 80))


def test_two_services(cluster: Cluster, pod: Sockets, pods: list[Host]) -> None:
    """What happens to one service moves nothing of another."""
    steady = manifests.service("steady", ["10.96.0.20"], [{"port": 80}])
    ports = [{"port": TARGET}]
    slices = manifests.endpoint_slice(
        "steady", "IPv4", [endpoint(pods[0]), endpoint(pods[1])], ports
    )
    cluster.publish(steady, slices, web(endpoint(pods[2])))
    before = entry(cluster)
    for count in (3, 0, 1, 2):
        cluster.publish(steady, slices, web(*map(endpoint, pods[:count])))
        assert requests.backends(pod, "10.96.0.20").keys() == {"web-1", "web-2"}
        assert entry(cluster) == before


def entry(cluster: Cluster) -> object:
    """The steady service as the map has it."""
    found = dict(cluster.maps["services"].items())
    return next(service for frontend, service in found.items() if str(frontend) == "10.96.0.20:80")
