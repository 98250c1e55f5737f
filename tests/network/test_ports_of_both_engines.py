# SPDX-License-Identifier: Apache-2.0
"""After a change of the engine the flow tables give no port that conntrack still has.

There is one masquerade port, and a client that is bound to it: its flow has it in conntrack too.
"""

from collections.abc import Iterator
from socket import SO_REUSEADDR, SOL_SOCKET

import pytest

from ebpflb.lab.sockets import CALL_SECONDS, Socket
from ebpflb.model.packet_path import Engine
from tests.kit import requests, two_nodes
from tests.kit.two_nodes import Frontends, TwoNodes

PORTS = 41000
WEB = Frontends(10)

families = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])
protocols = pytest.mark.parametrize("send", [requests.tcp, requests.udp])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    options = ("--masquerade-ports", f"{PORTS}-{PORTS}")
    with two_nodes.masquerading(tmp_path_factory.mktemp("two"), *options) as made:
        yield made


@pytest.fixture(autouse=True)
def afresh(two: TwoNodes) -> None:
    two.delete_all_flows()


def restart(two: TwoNodes, engine: Engine) -> None:
    """Near's agent, by which all of these flows go."""
    (agent,) = (agent for agent in two.agents if agent.node is two.near)
    agent.stop()
    agent.defaults = (f"--packet-path={engine}",)
    agent.start()


def client(
    two: TwoNodes,
    send: requests.Send,
    to: tuple[str, int],
    port: int = 0,
    seconds: float = CALL_SECONDS,
) -> Socket:
    make = requests.tcp_socket if send is requests.tcp else requests.udp_socket
    made = make(two.sockets(two.outside), to[0])
    if port:
        made.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        made.bind(("::" if ":" in to[0] else "0.0.0.0", port))
    made.settimeout(seconds)
    made.connect(to)
    made.send(b"first")
    return made


def asks(client: Socket, word: bytes) -> bool:
    """Whether what it sends comes back to it."""
    client.send(word)
    while True:
        said = client.recv(64)
        if said.endswith(word):
            return True


@pytest.mark.extended
@families
@protocols
def test_flow_tables_take_no_port_of_conntrack(
    two: TwoNodes, send: requests.Send, v6: bool
) -> None:
    """The new client gets none, as if all were in use; the connection of the old one goes on."""
    restart(two, Engine.CONNTRACK)
    to = WEB.to("nodeport", two.near, v6=v6)
    old = client(two, send, to, PORTS)
    assert asks(old, b"with conntrack")
    restart(two, Engine.FLOWS)
    with pytest.raises(OSError, match="timed out"):
        asks(client(two, send, to, seconds=2.0), b"another client")
    assert asks(old, b"still here")
    old.close()
