# SPDX-License-Identifier: Apache-2.0
"""`ebpflb run --kubeconfig` from end to end: the real agent on a fake API server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import netns

from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Lab
from ebpflb.lab.sockets import Sockets
from ebpflb.model.events import Kind
from ebpflb.serve import status
from tests.kit import requests
from tests.kit.api_server import FakeApiServer
from tests.kit.cluster import VIP, Cluster, endpoint, web
from tests.kit.lab_cluster import PREFIX


def server_on(cluster: Cluster, port: int = 0) -> FakeApiServer:
    """Made in the node's namespace, so that its socket is on the node's loopback."""
    netns.pushns(cluster.node.netns)
    try:
        return FakeApiServer(port=port)
    finally:
        netns.popns()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The agent is not started yet, and has no manifests."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Lab(PREFIX) as lab:
        made = Cluster(lab, tmp_path)
        try:
            yield made
        finally:
            made.close()


def fill(api: FakeApiServer, cluster: Cluster, *names: str) -> None:
    """Makes these pods the endpoints, on the API server."""
    pods = [pod for pod in cluster.web if pod.name in names]
    for manifest in (*web(*map(endpoint, pods)), manifests.node("node", cluster.node.v4)):
        api.put(manifest)


def answering(pod: Sockets) -> set[str]:
    try:
        return set(requests.backends(pod, VIP))
    except (ConnectionRefusedError, TimeoutError):  # no endpoint yet, or no service
        return set()


def source_errors(cluster: Cluster) -> dict[str, str]:
    last = status.read(cluster.agent.paths)
    return dict(last.source_errors) if last else {}


def test_life_with_an_api_server(cluster: Cluster, tmp_path: Path) -> None:
    """A service comes and changes; the server goes, which the status names, and services go on."""
    pod = cluster.sockets(cluster.client)
    with server_on(cluster) as api:
        cluster.agent.options = ("--kubeconfig", str(api.kubeconfig(tmp_path)))
        cluster.agent.start()
        fill(api, cluster, "web-1", "web-2")
        wait_until("the service is there", lambda: answering(pod) == {"web-1", "web-2"})
        fill(api, cluster, "web-3")
        wait_until("its endpoints changed", lambda: answering(pod) == {"web-3"})
        port = int(api.url.rpartition(":")[2])
    wait_until("the status names the server", lambda: len(source_errors(cluster)) == len(Kind))
    assert all(source.startswith(api.url) for source in source_errors(cluster))
    assert answering(pod) == {"web-3"}
    with server_on(cluster, port) as api:
        for _ in range(5):  # beyond the versions that the agent knows
            fill(api, cluster, "web-1")
        api.compact()
        wait_until("all have recovered", lambda: not source_errors(cluster))
        wait_until("what is new is served", lambda: answering(pod) == {"web-1"})
        cluster.agent.stop()
        assert answering(pod) == {"web-1"}
