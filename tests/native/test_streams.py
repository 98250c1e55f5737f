# SPDX-License-Identifier: Apache-2.0
"""Stream sockets have one peer at a time, counted from connect to release."""

from tests.native.node import NativeNode

WEB, ADDRESS = "172.30.0.1:80", "172.30.0.2:80"
ONE, TWO = "10.1.0.1:8080", "10.1.0.2:8080"


def two_services(node: NativeNode) -> None:
    node.publish(1, [WEB], cluster=[ONE])
    node.publish(2, [ADDRESS], cluster=[TWO])


def test_a_connection_closes_with_its_socket(node: NativeNode) -> None:
    """A connection opens on its backend and closes with its socket."""
    two_services(node)
    socket = node.socket()
    socket.connect(WEB)
    assert node.opened_closed(1, ONE) == (1, 0)
    socket.release()
    assert node.opened_closed(1, ONE) == (1, 1)
    assert not node.kernel.sockets()


def test_connecting_again_closes_the_former(node: NativeNode) -> None:
    """Connecting again closes the former connection, whether to the same service or another."""
    two_services(node)
    socket = node.socket()
    for to in (WEB, WEB, ADDRESS):
        socket.connect(to)
    assert node.opened_closed(1, ONE) == (2, 2)
    assert node.opened_closed(2, TWO) == (1, 0)
    assert len(node.kernel.sockets()) == 1
    socket.release()
    assert node.opened_closed(2, TWO) == (1, 1)


def test_every_connect_is_a_choice(node: NativeNode) -> None:
    """Each connection of a stream socket is balanced separately."""
    many = [f"10.1.0.{n}:8080" for n in range(1, 101)]
    node.publish(1, [WEB], cluster=many)
    socket = node.socket()
    assert len({socket.connect(WEB).place for _ in range(50)}) > 10
    assert not node.kernel.items("assignments")


def test_never_ours(node: NativeNode) -> None:
    """A socket that was not translated is not counted."""
    two_services(node)
    socket = node.socket()
    socket.connect("192.0.2.9:80")
    socket.release()
    assert node.counted() == {"passed": 1}
    assert not node.kernel.sockets()
