# SPDX-License-Identifier: Apache-2.0
"""UDP clients that keep their port follow each change of endpoints, in every table of flows.

The clients are outside: their packets are translated, not their sockets.
"""

from collections.abc import Iterator
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Socket
from ebpflb.model.packet_path import Engine
from tests.kit.cluster import NODEPORT, PORT, TARGET, Cluster, endpoint, running, web
from tests.kit.two_nodes import ENGINES, require

SOURCE = 12345  # the client's port, as `nc -u -p 12345`


@pytest.fixture(params=ENGINES)
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    engine: Engine = request.param
    require(engine)
    with running(tmp_path, engine=engine) as made:
        yield made


@pytest.fixture
def client(node: Cluster) -> Iterator[Socket]:
    with node.sockets(node.lab.outside("outside", 1)).open(AF_INET, SOCK_DGRAM) as opened:
        opened.bind(("0.0.0.0", SOURCE))
        opened.connect((node.node.v4, NODEPORT))
        opened.settimeout(0.1)
        yield opened


def serve(*endpoints: Manifest, target: int = TARGET) -> list[Manifest]:
    said = web(*endpoints, nodeport=NODEPORT)
    for each in said:
        if each["kind"] == "EndpointSlice":
            each["ports"] = [{**port, "port": target} for port in each["ports"]]
    return said


def ask(client: Socket) -> str:
    """Who answers; "" if nobody does."""
    try:
        client.send(b"?")
        return client.recv(64).split()[0].decode()
    except OSError:
        return ""


def follows(client: Socket, pod: Host) -> None:
    wait_until(f"{pod.name} answers", lambda: ask(client) == pod.name)


def test_changes_in_a_row(node: Cluster, client: Socket) -> None:
    """Each before the searches for sockets that follow the one before it are over."""
    for pod in node.web * 3:
        node.write(serve(endpoint(pod)))
        follows(client, pod)


def test_a_terminating_endpoint_whose_process_has_ended(node: Cluster, client: Socket) -> None:
    """It keeps its flow while it serves; when it does not any more, the client reaches another,
    though it is still listed.
    """
    one, other, _ = node.web
    program, _ = (node.start_program(pod, "serve", pod.name, str(PORT)) for pod in (one, other))
    node.publish(serve(endpoint(one), target=PORT))
    follows(client, one)
    leaving = {"ready": False, "terminating": True}
    node.publish(serve(endpoint(one, serving=True, **leaving), endpoint(other), target=PORT))
    assert ask(client) == one.name
    program.kill()
    program.wait()
    assert ask(client) == ""
    node.publish(serve(endpoint(one, serving=False, **leaving), endpoint(other), target=PORT))
    follows(client, other)
