# SPDX-License-Identifier: Apache-2.0
"""A socket that is connected elsewhere, or disconnected, forgets its former frontend."""

import pytest

from tests.native.node import NativeNode, Socket

WEB, OTHER = "172.30.0.1:80", "172.30.0.2:80"
BACKEND, ELSEWHERE = "10.1.0.1:8080", "198.51.100.7:53"


@pytest.fixture(params=["tcp", "udp"])
def socket(node: NativeNode, request: pytest.FixtureRequest) -> Socket:
    """Return a socket that is connected to a backend of two services; one of the services has no
    other backend.
    """
    protocol: str = request.param
    node.publish(1, [f"{WEB}/{protocol}"], cluster=[BACKEND])
    node.publish(2, [f"{OTHER}/{protocol}"], cluster=[BACKEND])
    made = node.socket(protocol)
    assert made.connect(WEB).place == BACKEND
    return made


@pytest.mark.parametrize("to", [BACKEND, ELSEWHERE])
def test_a_connect_that_is_left_alone_forgets(node: NativeNode, socket: Socket, to: str) -> None:
    """A socket connected to the backend itself, or to any host, shows that peer."""
    assert socket.connect(to).place == to
    assert socket.getpeername(to) == to
    assert socket.recvmsg(BACKEND) == BACKEND
    assert not node.kernel.sockets()
    assert not node.kernel.items("assignments")
    assert node.opened_closed(1, BACKEND) == (1, 1)


def test_the_last_frontend_is_shown(socket: Socket) -> None:
    """A socket that connects to another service shows that service, though it has the same
    backend.
    """
    assert socket.connect(OTHER).place == BACKEND
    assert socket.getpeername(BACKEND) == OTHER


def test_refused_elsewhere_forgets(node: NativeNode, socket: Socket) -> None:
    """A connect that is refused or waits also forgets the former frontend."""
    protocol = "udp" if socket.protocol == 17 else "tcp"
    node.publish(3, [f"172.30.0.3:80/{protocol}"])
    socket.connect("172.30.0.3:80")
    assert socket.getpeername(BACKEND) == BACKEND
    assert node.opened_closed(1, BACKEND) == (1, 1)


def test_a_disconnected_socket_has_no_frontend(node: NativeNode) -> None:
    """After AF_UNSPEC the backend's datagrams show its own address, until the next request to the
    service.
    """
    node.publish(1, [f"{WEB}/udp"], cluster=[BACKEND])
    socket = node.socket("udp")
    socket.connect(WEB)
    assert socket.recvmsg(BACKEND) == WEB
    socket.disconnect()
    assert socket.recvmsg(BACKEND) == BACKEND
    assert socket.sendmsg(WEB).place == BACKEND
    assert socket.recvmsg(BACKEND) == WEB
    socket.release()
    assert node.opened_closed(1, BACKEND) == (1, 1)
