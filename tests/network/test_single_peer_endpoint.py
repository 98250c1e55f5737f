# SPDX-License-Identifier: Apache-2.0
"""An endpoint that answers only its node: a pod whose default route leads by another network."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import requests
from tests.kit.cluster import NODEPORT, Cluster, endpoint, running, web


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """Its endpoint has a second network without clients, and the default route leads there."""
    with running(tmp_path, *request.param) as made:
        (pod, *_) = made.web
        for v6 in (False, True):
            pod.ip("route del default", v6=v6)
        pod.ip("link add net1 type veth peer name net2", "link set net1 up", "link set net2 up")
        for v6 in (False, True):
            pod.ip("route add default dev net1", v6=v6)
        made.publish(web(endpoint(pod), v6=[endpoint(pod, v6=True)], nodeport=NODEPORT))
        yield made


def option(*words: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cluster", [words], indirect=True, ids=[" ".join(words) or "-"])


def node_address(cluster: Cluster, v6: bool) -> str:
    return cluster.node.v6 if v6 else cluster.node.v4


families = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])


@option()
@families
def test_without(cluster: Cluster, v6: bool) -> None:
    """By default a client outside keeps its address, to which the endpoint has no way."""
    where = node_address(cluster, v6)
    outside = cluster.sockets(cluster.lab.outside("outside", 1))
    with requests.tcp_socket(outside, where) as client:
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.connect((where, NODEPORT))


@option("--masquerade-local-backends")
@families
def test_with(cluster: Cluster, v6: bool) -> None:
    """With --masquerade-local-backends it answers its node, as with kube-proxy."""
    where = node_address(cluster, v6)
    outside = cluster.sockets(cluster.lab.outside("outside", 1))
    for send in (requests.tcp, requests.udp):
        assert send(outside, where, NODEPORT).name == "web-1"
