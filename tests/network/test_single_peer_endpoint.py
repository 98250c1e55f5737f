# SPDX-License-Identifier: Apache-2.0
"""An endpoint that answers only its node: a pod whose default route leads to another network."""

from collections.abc import Iterable, Iterator

import pytest

from ebpflb.lab.router import NODES
from ebpflb.model.packet_path import Engine
from tests.kit import requests
from tests.kit.cluster import NODEPORT, Cluster, endpoint, running, web
from tests.kit.parameters import families
from tests.kit.sockets import Sockets
from tests.kit.two_nodes import ENGINES, require


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Yield a cluster whose endpoint has a second network without clients."""
    require(Engine(request.param[-1].partition("=")[2]))
    with running(tmp_path_factory.mktemp("cluster"), *request.param) as made:
        (pod, *_) = made.web
        pod.ip("link add net1 type veth peer name net2", "link set net1 up", "link set net2 up")
        yield made


@pytest.fixture(scope="module")
def outside(cluster: Cluster) -> Sockets:
    """Return a client's sockets outside."""
    return cluster.sockets(cluster.lab.outside("outside", 1))


@pytest.fixture(autouse=True)
def alone(cluster: Cluster) -> None:
    """Make this endpoint the only one, with its default route to the second network."""
    (pod, *_) = cluster.web
    for v6, neighbours in zip((False, True), NODES.networks, strict=True):
        others = [f"route flush exact {network}" for network in ("default", neighbours)]
        pod.ip(*others, "route add default dev net1", v6=v6)
    cluster.publish(web(endpoint(pod), v6=[endpoint(pod, v6=True)], nodeport=NODEPORT))


def option(*words: str, engines: Iterable[Engine] = (Engine.FLOWS,)) -> pytest.MarkDecorator:
    options = [(*words, f"--packet-path={engine}") for engine in engines]
    ids = list(map(" ".join, options))
    return pytest.mark.parametrize("cluster", options, indirect=True, ids=ids, scope="module")


def node_address(cluster: Cluster, v6: bool) -> str:
    return cluster.node.v6 if v6 else cluster.node.v4


@option(engines=ENGINES)
@families
def test_by_default_the_client_gets_no_reply(cluster: Cluster, outside: Sockets, v6: bool) -> None:
    """By default a client outside keeps its address, which the endpoint cannot reach."""
    where = node_address(cluster, v6)
    with requests.tcp_socket(outside, where) as client:
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.connect((where, NODEPORT))


@option("--masquerade-local-backends", engines=ENGINES)
@families
def test_a_masqueraded_client_gets_its_reply(cluster: Cluster, outside: Sockets, v6: bool) -> None:
    """With --masquerade-local-backends the endpoint answers its node, as with kube-proxy."""
    where = node_address(cluster, v6)
    for send in (requests.tcp, requests.udp):
        assert send(outside, where, NODEPORT).name == "web-1"
