# SPDX-License-Identifier: Apache-2.0
"""After a change of the engine no flow of the new one gets a port that a flow of the old one has.

Privileged source ports stay so, in both engines: from 512 on there are 424 of them, few enough that
a port which either engine chooses is often one of the other's.
"""

from collections.abc import Iterator
from socket import SO_REUSEADDR, SOL_SOCKET

import pytest

from ebpflb.lab.hosts import Host
from ebpflb.lab.sockets import Socket
from ebpflb.model.packet_path import Engine
from tests.kit import requests, two_nodes
from tests.kit.two_nodes import Frontends, TwoNodes
from tests.network.test_ports_of_both_engines import asks, families, protocols, restart

WEB = Frontends(10)
PORTS = range(600, 1024)
BEFORE, AFTER = 180, 60  # flows of the old engine, and ports of clients of the new one
PATIENCE = 60.0  # seconds
AGAIN = 0.5  # a datagram may be lost, where conntrack has the port that was found for it


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    with two_nodes.masquerading(tmp_path_factory.mktemp("two")) as made:
        yield made


@pytest.fixture(autouse=True)
def afresh(two: TwoNodes) -> None:
    two.delete_all_flows()


def opened(two: TwoNodes, host: Host, send: requests.Send, port: int, *, v6: bool) -> Socket:
    """A client with this port, connected."""
    to = WEB.to("nodeport", two.near, v6=v6)
    make = requests.tcp_socket if send is requests.tcp else requests.udp_socket
    made = make(two.sockets(host), to[0])
    made.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
    made.bind(("::" if v6 else "0.0.0.0", port))
    made.settimeout(PATIENCE if send is requests.tcp else AGAIN)
    made.connect(to)
    return made


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
def test_both_engines_flows_go_on(
    two: TwoNodes, send: requests.Send, before: Engine, v6: bool
) -> None:
    """Each client gets its own words back: those from before the change, and those that came after
    it, of which two at a time have one port, so that the node chooses another.
    """
    after = next(engine for engine in Engine if engine is not before)
    restart(two, before)
    old = [opened(two, two.outside, send, port, v6=v6) for port in PORTS[:BEFORE]]
    assert all(is_answered(each, send, b"old %d" % i) for i, each in enumerate(old))
    restart(two, after)
    hosts = two.outside, two.far
    new = [opened(two, host, send, port, v6=v6) for port in PORTS[-AFTER:] for host in hosts]
    served = [is_answered(each, send, b"new %d" % i) for i, each in enumerate(new)]
    kept = [is_answered(each, send, b"kept %d" % i) for i, each in enumerate(old)]
    for each in (*old, *new):
        each.close()
    assert (served.count(False), kept.count(False)) == (0, 0)
