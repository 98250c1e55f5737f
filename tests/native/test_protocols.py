# SPDX-License-Identifier: Apache-2.0
"""Which sockets are translated: TCP, MPTCP as TCP, and UDP."""

import pytest

from tests.native.node import DATAGRAM, MPTCP, SCTP, STREAM, TCP, UDP, NativeNode, Socket

ICMP, UDPLITE, RAW, SEQPACKET = 1, 136, 3, 5


@pytest.fixture
def both(node: NativeNode) -> NativeNode:
    """Publish one address and port for TCP and UDP, with one backend each."""
    node.publish(1, ["172.30.0.1:53/tcp"], cluster=["10.1.0.1:5301"])
    node.publish(2, ["172.30.0.1:53/udp"], cluster=["10.1.0.1:5302"])
    node.publish(3, ["172.30.0.1:53/sctp"], cluster=["10.1.0.1:5303"])
    return node


def typed(node: NativeNode, kind: int, protocol: int) -> Socket:
    socket = node.socket(protocol)
    socket.type = kind
    return socket


@pytest.mark.parametrize(
    ("kind", "protocol", "port"),
    [(STREAM, TCP, 5301), (STREAM, MPTCP, 5301), (DATAGRAM, UDP, 5302)],
)
def test_a_frontend_is_for_one_protocol(
    both: NativeNode, kind: int, protocol: int, port: int
) -> None:
    """The protocol is part of the frontend; a TCP service also serves MPTCP."""
    socket = typed(both, kind, protocol)
    assert socket.connect("172.30.0.1:53").place == f"10.1.0.1:{port}"
    assert socket.getpeername(f"10.1.0.1:{port}") == "172.30.0.1:53"
    socket.release()
    assert not both.kernel.sockets()


NOT_OURS = [
    (STREAM, SCTP),
    (SEQPACKET, SCTP),
    (DATAGRAM, ICMP),
    (DATAGRAM, UDPLITE),
    (RAW, ICMP),
    (RAW, TCP),
    (RAW, UDP),
    (STREAM, UDP),
    (DATAGRAM, TCP),
]


@pytest.mark.parametrize(("kind", "protocol"), NOT_OURS)
def test_other_sockets_are_left_alone(both: NativeNode, kind: int, protocol: int) -> None:
    """Sockets of other kinds pass every hook unchanged, uncounted, and are not remembered."""
    socket = typed(both, kind, protocol)
    for hook in (socket.connect, socket.sendmsg):
        assert hook("172.30.0.1:53") == (True, 0, "172.30.0.1:53")
    assert socket.bind("0.0.0.0:53").allowed
    assert socket.recvmsg("10.1.0.1:5302") == "10.1.0.1:5302"
    assert socket.getpeername("10.1.0.1:5301") == "10.1.0.1:5301"
    socket.release()
    assert both.counted() == {}
    assert not both.kernel.sockets()
