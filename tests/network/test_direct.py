# SPDX-License-Identifier: Apache-2.0
"""A client that uses one port for a Service and for its endpoint directly, by packets."""

from contextlib import ExitStack
from itertools import count
from socket import SO_REUSEADDR, SOL_SOCKET

import pytest

from tests.kit import requests
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import both_engines, families
from tests.kit.requests import Send
from tests.kit.sockets import Socket
from tests.kit.two_nodes import Frontends, TwoNodes, address

pytestmark = both_engines
PORTS = count(40_000)  # of clients: a connection that has ended keeps its own for a minute
SENDS: dict[str, Send] = {"tcp": requests.tcp, "udp": requests.udp}


def is_answered(client: Socket) -> bool:
    client.send(b"?")
    return bool(client.recv(64))


@families
@pytest.mark.parametrize("send", SENDS.values(), ids=SENDS)
@pytest.mark.parametrize("where", ["here", "there"])
def test_one_port(two: TwoNodes, where: str, send: Send, v6: bool) -> None:
    """The direct connection gets its own replies, after the Service's connection has ended and
    while it is open: from an endpoint on the same bridge, and beyond the stack.
    """
    endpoint = getattr(two, where)
    two.publish(two.service("web", 10, endpoint))
    to = Frontends(10).to("cluster", two.near, v6=v6)
    direct = (address(endpoint, to[0]), TARGET)
    with ExitStack() as stack:

        def connected(there: tuple[str, int], port: int) -> Socket:
            client = requests.socket_of(send, two.sockets(two.unhooked), there[0])
            stack.enter_context(client)
            client.settimeout(5)
            client.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            client.bind((address(two.unhooked, there[0]), port))
            client.connect(there)
            if send is requests.tcp:
                assert client.recv(64)
            assert is_answered(client)
            return client

        former, port = next(PORTS), next(PORTS)
        connected(to, former).close()
        connected(direct, former).close()
        both = connected(to, port), connected(direct, port)
        assert all(is_answered(client) for client in both * 2)
