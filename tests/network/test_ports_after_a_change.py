# SPDX-License-Identifier: Apache-2.0
"""After a change of the engine no flow of the new one gets a port that a flow of the old one has.

Each engine masquerades unprivileged ports with ports that the other never takes.
"""

from socket import SO_REUSEADDR, SOL_SOCKET

import pytest

from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from tests.kit import requests, two_nodes
from tests.kit.parameters import families, protocols
from tests.kit.sockets import Socket
from tests.kit.two_nodes import Frontends, TwoNodes

WEB = Frontends(10)
FIRST, FIRST_PRIVILEGED = 20_000, 600
COUNT = 424  # as many ports as there are privileged ones from 600 on
BEFORE, AFTER = 180, 60  # flows of the old engine, and ports of clients of the new one
PATIENCE = 20.0  # seconds
AGAIN = 0.5  # a datagram may be lost, where conntrack has the port that was found for it


two = two_nodes.fixture(engines=[Engine.NETFILTER], publish=two_nodes.web_on_far)


@pytest.fixture(autouse=True)
def afresh(two: TwoNodes) -> None:
    two.delete_all_flows()


def restart(two: TwoNodes, engine: Engine) -> None:
    """Near's agent, by which all of these flows go."""
    (agent,) = (agent for agent in two.agents if agent.node is two.near)
    agent.stop()
    agent.defaults = (f"--packet-path={engine}",)
    agent.start()


def opened(two: TwoNodes, host: Host, send: requests.Send, port: int, *, v6: bool) -> Socket:
    """A client with this port, connected."""
    to = WEB.to("nodeport", two.near, v6=v6)
    made = requests.socket_of(send, two.sockets(host), to[0])
    made.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
    made.bind(("::" if v6 else "0.0.0.0", port))
    made.settimeout(PATIENCE if send is requests.tcp else AGAIN)
    made.connect(to)
    return made


def asks(client: Socket, word: bytes) -> bool:
    """Whether what it sends comes back to it."""
    client.send(word)
    while True:
        said = client.recv(64)
        if said.endswith(word):
            return True


def is_answered(client: Socket, send: requests.Send, word: bytes) -> bool:
    """Whether what it sends comes back; a datagram is sent again."""
    tries = 1 if send is requests.tcp else int(PATIENCE / AGAIN)
    for _ in range(tries):
        try:
            return asks(client, word)
        except TimeoutError:
            continue
    return False


@families
@protocols
@pytest.mark.parametrize("before", list(Engine))
@pytest.mark.parametrize(
    "first",
    [
        FIRST,
        pytest.param(
            FIRST_PRIVILEGED,
            marks=pytest.mark.xfail(
                run=False, reason="both engines take a privileged port from 600 to 1023"
            ),
        ),
    ],
)
def test_both_engines_flows_go_on(
    two: TwoNodes, send: requests.Send, before: Engine, first: int, v6: bool
) -> None:
    """Each client gets its own words back: those from before the change, and those that came after
    it, of which two at a time have one port, so that the node chooses another.
    """
    ports = range(first, first + COUNT)
    after = next(engine for engine in Engine if engine is not before)
    restart(two, before)
    old = [opened(two, two.outside, send, port, v6=v6) for port in ports[:BEFORE]]
    assert all(is_answered(each, send, b"old %d" % i) for i, each in enumerate(old))
    restart(two, after)
    hosts = two.outside, two.far
    new = [opened(two, host, send, port, v6=v6) for port in ports[-AFTER:] for host in hosts]
    served = [is_answered(each, send, b"new %d" % i) for i, each in enumerate(new)]
    kept = [is_answered(each, send, b"kept %d" % i) for i, each in enumerate(old)]
    for each in (*old, *new):
        each.close()
    assert (served.count(False), kept.count(False)) == (0, 0)
