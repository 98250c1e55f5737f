# SPDX-License-Identifier: Apache-2.0
"""Segments in the middle of a connection that conntrack does not know, or takes for invalid."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path
from socket import IPPROTO_TCP, SO_REUSEADDR, SOCK_RAW, SOL_SOCKET
from typing import NamedTuple

import pytest

from ebpflb.kernel.netfilter import conntrack
from ebpflb.lab.hosts import Host
from tests.kernel.node import nodes
from tests.kit import flood, requests
from tests.kit.firewall import chain, rules
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import families, netfilter, packet_clients, protocols
from tests.kit.requests import Send
from tests.kit.sockets import Socket
from tests.kit.two_nodes import Frontends, TwoNodes

FLOOD = Path(flood.__file__)
FRONTENDS, OWN = Frontends(10), Frontends(11)
OWN_TARGET = TARGET + 1
CONNECTIONS, ROUNDS = 20, 3
AHEAD = 1_000_000  # far more than any window of these connections
SYN, RST, PSH, ACK = 2, 4, 8, 16
TCP_REPAIR, TCP_REPAIR_QUEUE, TCP_QUEUE_SEQ = 19, 20, 21
REPAIR_ON, REPAIR_OFF, SEND_QUEUE = 1, -1, 2
A_MOMENT = 0.2  # seconds in which nothing may come

pytestmark = netfilter


def address(host: Host, v6: bool) -> str:
    return host.v6 if v6 else host.v4


@families
@protocols
@packet_clients
def test_flows_outlive_their_entries(
    two: TwoNodes, who: str, kind: str, send: Send, v6: bool
) -> None:
    """After `conntrack -F` the next packet of a client that is not masqueraded goes to the same
    endpoint: the same hash chooses it. Nothing is lost.
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


class Pair(NamedTuple):
    """Both ends of a connection, and what each end sees of the other."""

    client: Socket
    backend: Socket

    def answers(self) -> bool:
        """Whether both can send, the client first."""
        self.client.send(b"ping")
        if self.backend.recv(64) != b"ping":
            return False
        self.backend.send(b"pong")
        return bool(self.client.recv(64) == b"pong")


@contextmanager
def connection(
    two: TwoNodes, client: Host, kind: str, endpoint: Host, *, v6: bool
) -> Iterator[Pair]:
    """Through a service of its own, whose endpoint is a socket of the test."""
    two.publish(two.one_port("own", 11, endpoint, OWN_TARGET))
    where = OWN.to(kind, two.near, v6=v6)
    with (
        requests.tcp_socket(two.sockets(endpoint), where[0]) as listening,
        requests.tcp_socket(two.sockets(client), where[0]) as opened,
    ):
        listening.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        listening.bind((address(endpoint, v6), OWN_TARGET))
        listening.listen(1)
        opened.connect(where)
        backend, _ = listening.accept()
        with backend:
            yield Pair(opened, backend)


@contextmanager
def listening(two: TwoNodes, host: Host, *, v6: bool) -> Iterator[Socket]:
    """A socket that gets all TCP segments that come to a host."""
    with two.sockets(host).open(requests.family_of(address(host, v6)), SOCK_RAW, IPPROTO_TCP) as it:
        it.settimeout(A_MOMENT)
        yield it


def sources(raw: Socket) -> set[str]:
    """Who has sent the segments that have come until now."""
    found = set[str]()
    while True:
        try:
            _, sender = raw.recvfrom(1 << 16)
        except TimeoutError:
            return found
        found.add(str(ip_address(sender[0])))


def next_number(backend: Socket) -> int:
    """The sequence number of what this end will send next."""
    backend.setsockopt(IPPROTO_TCP, TCP_REPAIR, REPAIR_ON)
    backend.setsockopt(IPPROTO_TCP, TCP_REPAIR_QUEUE, SEND_QUEUE)
    number = backend.getsockopt(IPPROTO_TCP, TCP_QUEUE_SEQ)
    backend.setsockopt(IPPROTO_TCP, TCP_REPAIR, REPAIR_OFF)
    backend.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)  # the kernel has reset it
    return int(number) & 0xFFFFFFFF


def send_segment(
    two: TwoNodes, host: Host, source_port: int, to: tuple[str, int], flags: int, number: int
) -> None:
    source = address(host, ":" in to[0])
    words = to[0], str(to[1]), source, str(source_port), str(flags), str(number)
    assert two.lab.keep(host.python(FLOOD, "one", *words)).wait() == 0


def dropped(node: Host) -> int:
    """How many segments our rules have kept from clients."""
    words = [*node.enter, "nft", "-j", "list", "chain", "inet", "ebpflb", "untranslated"]
    said = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    expressions = (e for it in said["nftables"] if "rule" in it for e in it["rule"]["expr"])
    return sum(each["counter"]["packets"] for each in expressions if "counter" in each)


@families
@pytest.mark.parametrize(
    ("who", "kind", "where"),
    [
        ("unhooked", "cluster", "here"),
        ("unhooked", "cluster", "there"),
        ("outside", "nodeport", "here"),
        ("outside", "nodeport", "there"),
    ],
)
def test_a_segment_out_of_window_ends_no_connection(
    two: TwoNodes, who: str, kind: str, where: str, v6: bool
) -> None:
    """No one gets an endpoint's segment untranslated: neither the client, nor the node that has
    masqueraded it. Each would answer by a reset (kubernetes#74839).
    """
    client, endpoint = getattr(two, who), getattr(two, where)
    untracked = chain("prerouting", "raw", "notrack")  # else it would drop the segment already
    with (
        rules(two.far, untracked),
        connection(two, client, kind, endpoint, v6=v6) as pair,
        listening(two, client, v6=v6) as raw,
    ):
        assert pair.answers()
        sees = pair.backend.getpeername()[:2]
        before, number = dropped(two.near), next_number(pair.backend) + AHEAD
        send_segment(two, endpoint, OWN_TARGET, sees, PSH | ACK, number & 0xFFFFFFFF)
        assert dropped(two.near) == before + 1
        assert pair.answers()
        assert address(endpoint, v6) not in sources(raw)
