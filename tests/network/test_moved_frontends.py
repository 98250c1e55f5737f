# SPDX-License-Identifier: Apache-2.0
"""An address and port that passes to another service; UDP clients follow (kube-proxy.md 11.1)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Lab
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Socket
from ebpflb.model.packet_path import Engine
from ebpflb.node import sock_diag
from tests.kit import requests
from tests.kit.cluster import EXTERNAL, PORT, Cluster, endpoint
from tests.kit.lab_cluster import NODEPORT, PREFIX, TARGET
from tests.kit.moved_flows import wait_until_only
from tests.kit.two_nodes import ENGINES, require

OTHER_PORT = NODEPORT + 1


class Node(Cluster):
    def __init__(self, lab: Lab, folder: Path, engine: Engine) -> None:
        super().__init__(lab, folder, engine=engine)
        self.outside = lab.outside("outside", 1)
        lab.router.lead(f"{EXTERNAL}/32", self.node.v4)

    def service(self, number: int, nodeport: int, external: str | None) -> list[Manifest]:
        """The service "web-<number>", whose endpoint is the pod of that name."""
        port = {"name": "udp", "protocol": "UDP", "port": PORT, "nodePort": nodeport}
        name, ip = f"web-{number}", f"10.96.0.{number}"
        spec = {"type": "NodePort", "externalIPs": [external] if external else []}
        target = [{"name": "udp", "protocol": "UDP", "port": TARGET}]
        return [
            manifests.service(name, [ip], [port], **spec),
            manifests.endpoint_slice(name, "IPv4", [endpoint(self.web[number - 1])], target),
        ]

    def swap(self, *, swapped: bool) -> None:
        """The first service has NODEPORT and the external IP, the second OTHER_PORT; or reverse."""
        first, second = (2, 1) if swapped else (1, 2)
        self.publish(
            self.service(first, NODEPORT, EXTERNAL), self.service(second, OTHER_PORT, None)
        )


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    engine = getattr(request, "param", Engine.FLOWS)
    require(engine)
    with Lab(PREFIX) as lab:
        made = Node(lab, tmp_path, engine)
        try:
            made.start()
            made.swap(swapped=False)
            yield made
        finally:
            made.close()


def answers(client: Socket) -> str:
    """Who replies on a connected socket."""
    client.send(b"?")
    name: str = client.recv(64).split()[0].decode()
    return name


@pytest.mark.parametrize("node", ENGINES, indirect=True)
@pytest.mark.parametrize("where", ["nodeport", "external"])
def test_packets(node: Node, where: str) -> None:
    """Flows of a client outside go to the service that has the NodePort or external IP now."""
    host, port = (node.node.v4, NODEPORT) if where == "nodeport" else (EXTERNAL, PORT)
    with requests.udp_socket(node.sockets(node.outside), host) as client:
        client.connect((host, port))
        for swapped, name in ((False, "web-1"), (True, "web-2"), (False, "web-1")):
            node.swap(swapped=swapped)
            wait_until_only(node.node, client.getsockname()[1], node.web[int(swapped)])
            assert [answers(client) for _ in range(3)] == [name] * 3


def test_unconnected_socket(node: Node) -> None:
    """A socket of a pod that names the address with each datagram follows it."""
    where = node.node.v4, NODEPORT
    with requests.udp_socket(node.sockets(node.client), where[0]) as client:
        for swapped, name in ((False, "web-1"), (True, "web-2"), (False, "web-1")):
            node.swap(swapped=swapped)
            for _ in range(3):
                assert requests.exchange(client, *where).name == name


@pytest.mark.skipif(not sock_diag.can_destroy(), reason="this kernel ends no sockets")
def test_connected_socket(node: Node) -> None:
    """A connected socket of a pod is ended, as when its backend is removed, and connects again."""
    where = node.node.v4, NODEPORT
    with requests.udp_socket(node.sockets(node.client), where[0]) as client:
        client.connect(where)
        assert answers(client) == "web-1"
        node.swap(swapped=True)

        def is_ended() -> bool:
            try:
                return answers(client) != "web-1"
            except OSError:
                return True

        wait_until("the socket is ended", is_ended)
    with requests.udp_socket(node.sockets(node.client), where[0]) as client:
        client.connect(where)
        assert answers(client) == "web-2"
