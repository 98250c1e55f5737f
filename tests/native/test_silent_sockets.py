# SPDX-License-Identifier: Apache-2.0
"""An unconnected UDP socket keeps its backend as long as conntrack would keep the flow."""

import pytest

from tests.native.node import SECOND, NativeNode, Socket

DNS = "172.30.0.10:53"
OLD, ADDED = "10.1.0.1:53", "10.1.0.2:53"
UDP, STREAM = 30, 120  # nf_conntrack_udp_timeout, nf_conntrack_udp_timeout_stream


@pytest.fixture
def socket(node: NativeNode) -> Socket:
    """Return a socket that has sent to the only backend; any new choice gives another backend."""
    node.publish(1, [f"{DNS}/udp"], cluster=[OLD])
    made = node.socket("udp")
    assert made.sendmsg(DNS).place == OLD
    node.publish(1, [f"{DNS}/udp"], cluster=[OLD, ADDED])
    node.kernel.dice = lambda: 0xFFFFFFFF
    return made


def after(socket: Socket, seconds: float) -> str:
    """Return the destination of the socket's next datagram after this time of silence."""
    socket.kernel.now += int(seconds * SECOND)
    return socket.sendmsg(DNS).place


def test_a_silent_socket_sees_an_added_backend(node: NativeNode, socket: Socket) -> None:
    """After 30 seconds without a reply a new backend is drawn; the old one is closed."""
    assert after(socket, UDP) == ADDED
    assert (node.opened_closed(1, OLD), node.opened_closed(1, ADDED)) == ((1, 1), (1, 0))
    assert socket.recvmsg(ADDED) == DNS
    assert socket.recvmsg(OLD) == OLD


def test_each_datagram_prolongs(socket: Socket) -> None:
    """A socket that sends more often keeps its backend."""
    for _ in range(10):
        assert after(socket, UDP - 1) == OLD
    assert after(socket, UDP) == ADDED


def test_a_stream_is_kept_longer(socket: Socket) -> None:
    """Replies two seconds after the first one make it a stream, which is kept for 120 seconds."""
    assert socket.recvmsg(OLD) == DNS
    assert after(socket, 2) == OLD
    assert after(socket, STREAM - 1) == OLD
    assert socket.recvmsg(OLD) == DNS
    assert after(socket, STREAM) == ADDED


def test_one_reply_is_no_stream(socket: Socket) -> None:
    """A request and its answer are forgotten after 30 seconds."""
    assert socket.recvmsg(OLD) == DNS
    assert after(socket, UDP) == ADDED


def test_a_new_flow_is_no_stream(socket: Socket) -> None:
    """A flow with a new backend is no stream yet: 30 seconds of silence end it."""
    assert socket.recvmsg(OLD) == DNS
    assert after(socket, 2) == OLD
    assert after(socket, STREAM) == ADDED
    socket.kernel.dice = lambda: 0
    assert after(socket, UDP) == OLD


def test_getpeername_is_no_reply(socket: Socket) -> None:
    """Only received datagrams count as replies, not a call of getpeername."""
    assert socket.getpeername(OLD) == DNS
    assert after(socket, 3) == OLD
    assert after(socket, UDP) == ADDED
