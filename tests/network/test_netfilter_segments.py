# SPDX-License-Identifier: Apache-2.0
"""Packets in the middle of a flow that conntrack has forgotten."""

from contextlib import ExitStack

from ebpflb.kernel.netfilter import conntrack
from tests.kernel.node import nodes
from tests.kit import requests
from tests.kit.parameters import families, netfilter, packet_clients, protocols
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes

FRONTENDS = Frontends(10)
CONNECTIONS, ROUNDS = 20, 3

pytestmark = netfilter


@families
@protocols
@packet_clients
def test_flows_outlive_their_entries(
    two: TwoNodes, who: str, kind: str, send: Send, v6: bool
) -> None:
    """After `conntrack -F` the next packet of a client that is not masqueraded reaches the same
    endpoint, by the same hash. No packet is lost.
    """
    two.publish(two.service("web", 10, two.here, two.twin, externalTrafficPolicy="Local"))
    where = FRONTENDS.to(kind, two.near, v6=v6)
    with ExitStack() as stack:
        clients = [
            stack.enter_context(requests.socket_of(send, two.sockets(getattr(two, who)), where[0]))
            for _ in range(CONNECTIONS)
        ]
        names = []
        for client in clients:
            client.connect(where)
            if send is requests.udp:
                client.send(b"?")
            names.append(client.recv(64).split()[0].decode())
        assert set(names) == {"here", "twin"}
        for number in range(ROUNDS):
            with nodes.entered(two.near.netns):
                conntrack.delete(conntrack.connections(lambda *_: True))
            word = b"round %d" % number
            for client, name in zip(clients, names, strict=True):
                client.send(word)
                answer = client.recv(64)
                assert answer.endswith(word)
                assert send is requests.tcp or answer.split()[0].decode() == name
