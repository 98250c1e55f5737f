# SPDX-License-Identifier: Apache-2.0
"""The Node says whether Services work, also without an agent (docs/node-readiness.md)."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.model.nodes import CONDITION, CONDITION_TYPE, TAINT, TAINT_KEY
from tests.kernel.node import nodes
from tests.kit import requests
from tests.kit.api_history import Json
from tests.kit.api_server import FakeApiServer
from tests.kit.cluster import NODEPORT, VIP, ServingOutside, endpoint, web
from tests.kit.lab_cluster import new_lab
from tests.kit.two_nodes import ENGINES, require

API_PORT = 6443
OTHER: Json = {"key": "dedicated", "effect": "NoSchedule"}


class Node:
    """The node, whose agent is not started yet, and its API server."""

    def __init__(self, cluster: ServingOutside, api: FakeApiServer) -> None:
        self.cluster, self.api = cluster, api
        taints = [OTHER, {"key": TAINT_KEY, "effect": "NoSchedule"}]
        node = manifests.node("node", cluster.node.v4, cluster.node.v6, taints=taints)
        for each in (node, *web(*map(endpoint, cluster.web), nodeport=NODEPORT)):
            api.put(each)

    def start(self, kind: str) -> None:
        config = self.api.kubeconfig(self.cluster.folder)
        options = "--kubeconfig", str(config), "--node-readiness", kind
        self.cluster.agent.options = options
        self.cluster.agent.start()

    def status(self) -> str:
        """Return the status of the condition; "" if there is none."""
        conditions = self.api.node("node").get("status", {}).get("conditions", [])
        return "".join(it["status"] for it in conditions if it["type"] == CONDITION_TYPE)

    def taints(self) -> list[str]:
        return [each["key"] for each in self.api.node("node")["spec"]["taints"]]

    def says_so(self, kind: str) -> bool:
        return self.status() == "True" if kind == CONDITION else TAINT_KEY not in self.taints()

    def serves(self) -> None:
        """Whether sockets and packets are served at once."""
        requests.tcp(self.cluster.sockets(self.cluster.client), VIP)
        outside = self.cluster.sockets(self.cluster.outside)
        requests.tcp(outside, self.cluster.node.v4, NODEPORT)

    def serves_as_soon_as_it_says_so(self, kind: str) -> None:
        wait_until("the Node says that Services work", lambda: self.says_so(kind))
        self.serves()


@pytest.fixture(params=ENGINES, ids=str)
def node(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Node]:
    require(request.param)
    with new_lab() as lab:
        cluster = ServingOutside(lab, tmp_path, engine=request.param)
        place = cluster.web[0]
        monkeypatch.setenv("NO_PROXY", place.v4)
        try:
            with inside(place.netns, place.v4) as api:
                yield Node(cluster, api)
        finally:
            cluster.close()


@contextmanager
def inside(namespace: str, address: str) -> Iterator[FakeApiServer]:
    """Run an API server in a pod."""
    with nodes.entered(namespace):
        made = FakeApiServer(port=API_PORT, address=address)
    with made:
        yield made
        made.hang_up()


@pytest.mark.parametrize("kind", [CONDITION, TAINT])
def test_the_first_connection_after_the_node_says_so_is_served(node: Node, kind: str) -> None:
    """A pod of the node and a client outside are served once the Node says so. Nothing else in the
    Node is written.
    """
    for host in (node.cluster.client, node.cluster.outside):
        node.cluster.sockets(host)  # is ready before
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(node.serves_as_soon_as_it_says_so, kind)
        node.start(kind)
        first.result(240)
    assert node.taints() == [OTHER["key"], *([TAINT_KEY] if kind == CONDITION else [])]
    assert node.status() == ("True" if kind == CONDITION else "")
    written = 'ebpflb_node_readiness_writes_total{result="success"}'
    assert [line for line in node.cluster.metrics() if line.startswith(written)] != [f"{written} 0"]
