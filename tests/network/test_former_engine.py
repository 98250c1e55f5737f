# SPDX-License-Identifier: Apache-2.0
"""From an ebpflb before the engine netfilter: its connections go on.

Its programs made conntrack's entries themselves, before the kernel had seen a packet of them, and a
table of its own kept NAT at work. Here the test makes both.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import ip_address
from itertools import product
from typing import NamedTuple

import pytest

from bench import conntrack_filler
from ebpflb.entries.flows import Ends
from ebpflb.kernel.netfilter import watch
from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from ebpflb.model.services import Protocol
from tests.kernel.node import nodes
from tests.kit import requests
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import netfilter
from tests.kit.requests import Send
from tests.kit.sockets import Socket
from tests.kit.two_nodes import Frontends, TwoNodes, address

FRONTENDS = Frontends(10)
FIRST_PORT = 41000

pytestmark = netfilter


@pytest.fixture
def left(two: TwoNodes) -> Iterator[TwoNodes]:
    """The near node has no agent and nothing of ours but the former table."""
    agent, *_ = two.agents
    two.publish(two.service("web", 10, two.here, two.there))
    agent.stop()
    two.close_maps()
    assert two.ebpflb("cleanup").returncode == 0
    chosen = agent.defaults
    for name in ("udp_timeout", "udp_timeout_stream"):  # an emulated agent starts for longer
        two.near.sysctl(f"net.netfilter.nf_conntrack_{name}", 600)
    with nodes.entered(two.near.netns):
        watch.keep_nat_hooks()
    yield two
    restart(two, *chosen)


def restart(two: TwoNodes, *options: str) -> None:
    agent, *_ = two.agents
    agent.stop()
    agent.defaults = options
    agent.start()


class Client(NamedTuple):
    """A client outside, connected by a forged entry to the endpoint of this name."""

    opened: Socket
    send: Send
    endpoint: str

    def goes_on(self) -> bool:
        """Whether the endpoint answers; of datagrams each answer has its name."""
        if self.send is requests.tcp:
            return requests.lives(self.opened)
        self.opened.send(b"?")
        return requests.receive(self.opened).name == self.endpoint


def opened(two: TwoNodes, stack: ExitStack) -> Iterator[Client]:
    """A client for each protocol, family and endpoint, which has been answered once."""
    kinds = product((requests.tcp, requests.udp), (False, True), (two.here, two.there))
    for port, (send, v6, endpoint) in enumerate(kinds, FIRST_PORT):
        client = stack.enter_context(connected(two, send, endpoint, port, v6=v6))
        if send is requests.udp:
            client.send(b"?")
        assert client.recv(64).split()[0].decode() == endpoint.name
        yield Client(client, send, endpoint.name)


def connected(two: TwoNodes, send: Send, endpoint: Host, port: int, *, v6: bool) -> Socket:
    """The node masquerades what goes to the far endpoint."""
    where = FRONTENDS.to("nodeport", two.near, v6=v6)
    client, server, node = (
        ip_address(address(it, where[0])) for it in (two.outside, endpoint, two.near)
    )
    ends = Ends(client, ip_address(where[0]), port, where[1])
    protocol = Protocol.TCP if send is requests.tcp else Protocol.UDP
    with nodes.entered(two.near.netns):
        source = node if endpoint is two.there else None
        conntrack_filler.forge(protocol, ends, (server, TARGET), source)
    made = requests.socket_of(send, two.sockets(two.outside), where[0])
    made.bind((str(client), port))
    made.connect(where)
    return made


def test_connections_go_on(left: TwoNodes) -> None:
    """While an agent starts with netfilter, and later changes to the flow tables and back. Each
    stays with its endpoint, and new ones are served.
    """
    with ExitStack() as stack:
        clients = list(opened(left, stack))
        for engine in (Engine.NETFILTER, Engine.FLOWS, Engine.NETFILTER):
            restart(left, f"--packet-path={engine}")
            for client in clients:
                assert client.goes_on()
            where = FRONTENDS.to("nodeport", left.near)
            served = requests.backends(left.sockets(left.outside), where[0], port=where[1])
            assert set(served) == {"here", "there"}
