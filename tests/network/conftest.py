# SPDX-License-Identifier: Apache-2.0
"""A cluster for each file of tests, or group of files, removed after its last test."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Literal

import pytest

from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from tests.kit import beside_kube_proxy, both_proxies, needs, two_nodes
from tests.kit.beside_kube_proxy import BesideKubeProxy
from tests.kit.both_proxies import Both
from tests.kit.cluster import Cluster, running
from tests.kit.groups import KeptCluster, group
from tests.kit.sockets import Sockets
from tests.kit.stale_udp import Changes
from tests.kit.two_nodes import TwoNodes

IN_LANE = "EBPFLB_TEST_SHARED" in os.environ
KEPT = KeptCluster()


def breadth(fixture_name: str, config: pytest.Config) -> Literal["session", "module"]:
    """Let the files that a lane names share a cluster, because a cluster takes 20 s or more in the
    kernel lab.
    """
    return "session" if IN_LANE else "module"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Remove the cluster after the last test of a group."""
    try:
        return (yield)
    finally:
        is_last = nextitem is None or group(nextitem.nodeid) != group(item.nodeid)
        if is_last and not IN_LANE:
            KEPT.remove()


@pytest.fixture(scope=breadth)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield KEPT.get("cluster", lambda: running(tmp_path_factory.mktemp("cluster")))
    if IN_LANE:
        KEPT.remove()


@pytest.fixture
def pod(cluster: Cluster) -> Sockets:
    """Return the sockets of the pod called client."""
    return cluster.sockets(cluster.client)


@pytest.fixture
def host(cluster: Cluster) -> Sockets:
    """Return the sockets of the node itself."""
    return cluster.sockets(cluster.node)


@pytest.fixture(params=["pod", "host"])
def sockets(request: pytest.FixtureRequest) -> Sockets:
    """Return the client's sockets: of a pod, or of the node itself, as for a pod in the host's
    network.
    """
    found: Sockets = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def pods(cluster: Cluster) -> list[Host]:
    """Return the pods that serve."""
    return cluster.web


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Open sockets, and close them after the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def changes(cluster: Cluster) -> Iterator[Changes]:
    made = Changes(cluster)
    yield made
    made.close()


@pytest.fixture(scope=breadth)
def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoNodes]:
    """Yield two nodes that recognize pods by their addresses, with one of ENGINES; by default the
    flow tables.
    """
    engine = getattr(request, "param", Engine.FLOWS)
    folder, options = tmp_path_factory.mktemp("two"), two_nodes.CLUSTER_CIDR
    yield KEPT.get(engine, lambda: two_nodes.running(folder, *options, engine=engine))
    if IN_LANE:
        KEPT.remove()


@pytest.fixture(scope="module", params=list(Engine))
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    with both_proxies.running(tmp_path_factory.mktemp("both"), request.param) as made:
        yield made


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BesideKubeProxy]:
    needs.netfilter()
    with beside_kube_proxy.running(tmp_path_factory.mktemp("pair")) as made:
        yield made


@pytest.fixture
def pair(pairs: BesideKubeProxy) -> BesideKubeProxy:
    """Yield two nodes with empty tables."""
    pairs.forget()
    return pairs
