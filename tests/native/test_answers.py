# SPDX-License-Identifier: Apache-2.0
"""The addresses that getpeername and recvmsg show."""

import pytest

from tests.native.node import NativeNode

WEB = "172.30.0.1:80"
POD = "10.1.0.1:8080"
FAMILIES = [
    ("172.30.0.1:80", "10.1.0.1:8080", "172.30.0.1:80"),
    ("[fd00:30::1]:80", "[fd00:1::1]:8080", "[fd00:30::1]:80"),
    ("[::ffff:172.30.0.1]:80", "[::ffff:10.1.0.1]:8080", "[::ffff:172.30.0.1]:80"),
]


@pytest.fixture
def web(node: NativeNode) -> NativeNode:
    for protocol, service in (("tcp", 1), ("udp", 2)):
        node.publish(service, [f"{WEB}/{protocol}"], cluster=[POD])
    for protocol, service in (("tcp", 3), ("udp", 4)):
        node.publish(service, [f"[fd00:30::1]:80/{protocol}"], cluster=["[fd00:1::1]:8080"])
    return node


@pytest.mark.parametrize(("to", "real", "shown"), FAMILIES)
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_getpeername_shows_the_requested_address(
    web: NativeNode, protocol: str, to: str, real: str, shown: str
) -> None:
    """A connected socket's peer is the address that it connected to, in the same form."""
    socket = web.socket(protocol)
    assert socket.connect(to).place == real
    assert socket.getpeername(real) == shown
    assert web.counted() == {"translated": 1, "reply_translated": 1}


@pytest.mark.parametrize(("to", "real", "shown"), FAMILIES)
def test_recvmsg_shows_the_requested_address(
    web: NativeNode, to: str, real: str, shown: str
) -> None:
    """An answer seems to come from the requested address."""
    socket = web.socket("udp")
    socket.sendmsg(to)
    assert socket.recvmsg(real) == shown


def test_frontend_of_the_node(node: NativeNode) -> None:
    """With a NodePort the application sees the node's address that it used, not the unspecified
    one.
    """
    node.owns("192.0.2.1")
    node.publish(1, {"0.0.0.0:30080": "external"}, cluster=[POD])
    socket = node.socket()
    socket.connect("192.0.2.1:30080")
    assert socket.getpeername(POD) == "192.0.2.1:30080"


@pytest.mark.parametrize("real", ["10.1.0.2:8080", "10.1.0.1:8081", "[::1]:8080"])
def test_peer_is_another(web: NativeNode, real: str) -> None:
    """A peer that is not the backend is shown unchanged."""
    socket = web.socket()
    socket.connect(WEB)
    assert socket.getpeername(real) == real
    assert web.counted() == {"translated": 1}


def test_service_has_gone(web: NativeNode) -> None:
    """A connected socket's peer does not change when the service is deleted."""
    stream, datagram = web.socket("tcp"), web.socket("udp")
    stream.connect(WEB)
    datagram.sendmsg(WEB)
    web.withdraw(1, f"{WEB}/tcp")
    web.withdraw(2, f"{WEB}/udp")
    assert stream.getpeername(POD) == datagram.recvmsg(POD) == WEB


def test_many_backends(node: NativeNode) -> None:
    """One socket distinguishes the answers of its backends."""
    for n in range(1, 10):
        node.publish(n, [f"172.30.0.{n}:53/udp"], cluster=[f"10.1.0.{n}:53"])
    socket = node.socket("udp")
    for n in range(1, 10):
        socket.sendmsg(f"172.30.0.{n}:53")
    shown = {n: socket.recvmsg(f"10.1.0.{n}:53") for n in range(9, 0, -1)}
    assert shown == {n: f"172.30.0.{n}:53" for n in shown}


def test_after_release(web: NativeNode) -> None:
    """After a socket's release its cookie has no meaning."""
    for protocol in ("tcp", "udp"):
        socket = web.socket(protocol)
        socket.connect(WEB)
        socket.release()
        assert socket.getpeername(POD) == POD
