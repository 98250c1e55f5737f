# SPDX-License-Identifier: Apache-2.0
"""Nodes are probed by echo requests, through either kind of socket, and SYNs; in both families."""

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ebpflb.kernel.node.node_sockets import KUBELET_PORT, MOST_SYNS, SYN_SECONDS, NodeSockets
from ebpflb.lab.agents import wait_until
from ebpflb.lab.netns import Namespace, ip
from tests.kernel.node import nodes
from tests.kit.lab_cluster import PREFIX

PORT = 10246
ADDRESSES = ["127.0.0.1", "::1"]


@pytest.fixture(scope="module", params=["0 2147483647", "1 0"], ids=["ping", "raw"])
def namespace(request: pytest.FixtureRequest) -> Iterator[Namespace]:
    """Where every group has sockets for echo messages, or none, so that a raw one is needed."""
    made = Namespace(f"{PREFIX}-echo")
    made.create()
    made.sysctl("net.ipv4.ping_group_range", request.param)
    try:
        yield made
    finally:
        ip("netns", "delete", made.netns)


@pytest.fixture(params=ADDRESSES)
def sockets(request: pytest.FixtureRequest, namespace: Namespace) -> Iterator[NodeSockets]:
    with nodes.entered(namespace.netns):
        made = NodeSockets(request.param, PORT)
        yield made
        made.close()


def own(sockets: NodeSockets) -> str:
    return str(sockets.mail.getsockname()[0])


def test_a_node_answers_with_the_token(sockets: NodeSockets) -> None:
    """And nothing else is a reply: a raw socket sees those of other processes too."""
    found: list[tuple[str, int]] = []
    address, tokens = own(sockets), [1, 2**64 - 1]

    def read() -> bool:
        found.extend(sockets.replies())
        return len(found) >= len(tokens)

    other = NodeSockets(address, PORT + 1)
    kind = 128 if ":" in address else 8
    other.echo.sendto(bytes([kind, 0]) + bytes(6) + b"of another process", (address, 0))
    for token in tokens:
        sockets.probe(address, token)
    wait_until("it has answered", read)
    other.close()
    assert found == [(address, token) for token in tokens]


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
def test_a_node_answers_a_syn(sockets: NodeSockets, is_open: bool) -> None:
    """Whether anything listens at the kubelet's port or not; what listens there sees nothing."""
    address = own(sockets)
    found: list[tuple[str, int]] = []

    def read() -> bool:
        found.extend(sockets.syn_answers())
        return len(found) == 2

    with socket.socket(sockets.mail.family) as kubelet:
        kubelet.bind((address, KUBELET_PORT))
        if is_open:
            kubelet.listen()
        kubelet.setblocking(False)
        for token in (1, 2**64 - 1):
            sockets.send_syn(address, token)
        wait_until("it has answered", read)
        with pytest.raises(BlockingIOError if is_open else OSError):
            kubelet.accept()
    assert found == [(address, 1), (address, 2**64 - 1)]


def test_who_does_not_answer_a_syn_costs_a_socket_for_a_second(
    sockets: NodeSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not more than so many sockets; there is no answer that no one has sent."""
    before = len(os.listdir("/proc/self/fd"))
    nowhere = "2001:db8::1" if ":" in own(sockets) else "192.0.2.99"
    for token in range(2 * MOST_SYNS):
        sockets.send_syn(nowhere, token)
    assert not sockets.syn_answers()
    assert len(os.listdir("/proc/self/fd")) == before + MOST_SYNS
    later = time.monotonic() + SYN_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert not sockets.syn_answers()
    assert len(os.listdir("/proc/self/fd")) == before


def test_datagrams_come_with_their_sender(sockets: NodeSockets) -> None:
    found: list[tuple[bytes, str]] = []
    address = own(sockets)
    for number in range(3):
        sockets.send(address, bytes([number]) * 52)

    def read() -> bool:
        found.extend(sockets.datagrams(2))
        return len(found) == 3

    wait_until("all have come", read)
    assert found == [(bytes([number]) * 52, address) for number in range(3)]


def test_what_cannot_be_sent_is_lost(sockets: NodeSockets) -> None:
    """As on a node whose link is down."""
    nowhere = "2001:db8::1" if ":" in own(sockets) else "192.0.2.99"
    sockets.probe(nowhere, 1)
    sockets.send(nowhere, b"x")
    assert not sockets.replies()


def test_a_port_in_use_is_an_error(sockets: NodeSockets, namespace: Namespace) -> None:
    with nodes.entered(namespace.netns), pytest.raises(OSError, match="in use"):
        NodeSockets(own(sockets), PORT)


def test_nothing_blocks(sockets: NodeSockets) -> None:
    used: list[Any] = [sockets.echo, sockets.mail]
    assert [each.getblocking() for each in used] == [False, False]
    assert sockets.mail.type == socket.SOCK_DGRAM
