# SPDX-License-Identifier: Apache-2.0
"""`ebpflb run --kubeconfig` from end to end: the real agent on a fake API server."""

import sys
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from pyroute2 import netns

from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.model.events import Kind
from ebpflb.serve import status
from tests.kit import requests
from tests.kit.api_server import FakeApiServer
from tests.kit.cluster import VIP, Cluster, endpoint, web
from tests.kit.lab_cluster import new_lab
from tests.kit.sockets import Sockets


def server_on(cluster: Cluster, port: int = 0) -> FakeApiServer:
    """Return a server made in the node's namespace, so that it listens on the node's loopback."""
    netns.pushns(cluster.node.netns)
    try:
        return FakeApiServer(port=port)
    finally:
        netns.popns()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return a cluster whose agent is not started yet, and has no manifests."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with new_lab() as lab:
        made = Cluster(lab, tmp_path)
        try:
            yield made
        finally:
            made.close()


def fill(api: FakeApiServer, cluster: Cluster, *names: str) -> None:
    """Make these pods the endpoints, on the API server."""
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
    """A Service is created and changed; when the server is gone, Services keep working and the
    status says what is wrong.
    """
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


FAILING_AGENT = Path(__file__).parents[1] / "kit/failing_agent.py"
# Workers that begin their work without a reason from outside, with these options.
OPTIONS = "--node-readiness=condition", "--fast-forward=auto", "--packet-path=netfilter"
WORKERS = {
    *("devices", "each-packet", "ended connections", "events", "kube-proxy", "monitor"),
    *("moved-udp-flows", "netfilter-table", "node readiness", "node-local", "stale-conntrack"),
    *("stale-sockets", "sweep", "untracked"),
}


def test_services_are_served_while_every_worker_fails(cluster: Cluster, tmp_path: Path) -> None:
    """Endpoints change from the start, /livez is 200, and the status names each worker."""
    agent, pod = cluster.agent, cluster.sockets(cluster.client)
    agent.under = [sys.executable, "-P", str(FAILING_AGENT)]
    with server_on(cluster) as api:
        agent.options = (*OPTIONS, "--kubeconfig", str(api.kubeconfig(tmp_path)))
        agent.begin()
        fill(api, cluster, "web-1", "web-2")
        wait_until("it is served", lambda: answering(pod) == {"web-1", "web-2"})
        wait_until("all are named", lambda: failing_parts(cluster).keys() >= WORKERS)
        fill(api, cluster, "web-3")
        wait_until("endpoints changed", lambda: answering(pod) == {"web-3"})
        assert f"{api.url}/apis/networking.k8s.io/v1/servicecidrs" in failing_parts(cluster)
        assert set(failing_parts(cluster).values()) == {"TypeError: a mistake"}
        assert livez(cluster) == 200
        assert agent.process and agent.process.poll() is None


def failing_parts(cluster: Cluster) -> dict[str, str]:
    last = status.read(cluster.agent.paths)
    return dict(last.failing_parts) if last else {}


def livez(cluster: Cluster) -> int:
    netns.pushns(cluster.node.netns)
    try:
        with closing(HTTPConnection("127.0.0.1", 10256)) as connection:
            connection.request("GET", "/livez")
            return connection.getresponse().status
    finally:
        netns.popns()
