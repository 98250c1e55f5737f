# SPDX-License-Identifier: Apache-2.0
"""The memory used for a socket, and the effects of a full table."""

from functools import partial

import pytest

from tests.native.node import NativeNode, Socket

WEB, DNS, OTHER = "172.30.0.1:80", "172.30.0.10:53", "172.30.0.11:53"
ONE, TWO, THREE = "10.1.0.1:8080", "10.1.0.2:53", "10.1.0.3:53"
KEPT = ("sockets", "assignments", "peers")


@pytest.fixture(params=["places", "elsewhere"])
def serving(node: NativeNode, request: pytest.FixtureRequest) -> NativeNode:
    """Give sockets their places, or put all of them into the hash."""
    if request.param == "elsewhere":
        node.kernel.take_places()
    node.publish(1, [f"{WEB}/tcp"], cluster=[ONE])
    node.publish(2, [f"{DNS}/udp"], cluster=[TWO])
    node.publish(3, [f"{OTHER}/udp"], cluster=[TWO])
    return node


@pytest.fixture
def full(serving: NativeNode) -> NativeNode:
    """Leave room for one socket, which a connected socket has."""
    serving.kernel.take_places()
    serving.kernel.tables["sockets"].entries = 1
    assert serving.socket().connect(WEB).place == ONE
    return serving


def full_counts(node: NativeNode) -> tuple[int, int]:
    streams, datagrams, _ = node.kernel.get("sockets_full", 0)
    return streams, datagrams


def test_one_entry(serving: NativeNode) -> None:
    """The first datagram of a socket makes one entry, as a connection does."""
    serving.socket().connect(WEB)
    serving.socket("udp").sendmsg(DNS)
    assert serving.kernel.remembered() == {"sockets": 2, "assignments": 0, "peers": 0}


def test_full_table_costs_the_name(full: NativeNode) -> None:
    """With a full table a connection reaches its backend, but getpeername shows the backend's
    address.
    """
    socket = full.socket()
    assert socket.connect(WEB).place == ONE
    assert socket.getpeername(ONE) == ONE
    assert tuple(full.kernel.get("sockets_full", 0)) == (1, 0, 1)  # one socket is in the hash


def test_full_table_keeps_counts_exact(full: NativeNode) -> None:
    """With a full table a connection counts as closed at once, because no release would count
    it.
    """
    for protocol in ("tcp", "udp"):
        socket = full.socket(protocol)
        for _ in range(3):
            (socket.connect if protocol == "tcp" else socket.sendmsg)(
                WEB if protocol == "tcp" else DNS
            )
        socket.release()
    assert full.opened_closed(1, ONE) == (4, 3)
    assert full.opened_closed(2, TWO) == (1, 1)


def test_full_table_keeps_flows(full: NativeNode) -> None:
    """Datagrams still go to one backend, and their replies come from the frontend."""
    full.publish(2, [f"{DNS}/udp"], cluster=[TWO, THREE])
    socket = full.socket("udp")
    home = socket.sendmsg(DNS).place
    assert {socket.sendmsg(DNS).place for _ in range(20)} == {home}
    assert socket.recvmsg(home) == DNS
    assert full_counts(full) == (0, 1)


def test_full_table_keeps_counts_of_moved_flows(full: NativeNode) -> None:
    """A flow that counts as closed at once does not count as closed again when it moves."""
    full.publish(2, [f"{DNS}/udp"], cluster=[TWO])
    socket = full.socket("udp")
    assert socket.sendmsg(DNS).place == TWO
    full.publish(2, [f"{DNS}/udp"], cluster=[THREE])
    assert socket.sendmsg(DNS).place == THREE
    socket.release()
    assert full.opened_closed(2, TWO) == full.opened_closed(2, THREE) == (1, 1)
    assert full_counts(full) == (0, 2)


def test_full_table_gets_room(full: NativeNode) -> None:
    """As soon as there is room, sockets are remembered again; earlier flows continue."""
    socket = full.socket("udp")
    socket.sendmsg(DNS)
    full.kernel.tables["sockets"].entries = 2
    assert socket.sendmsg(OTHER).place == socket.sendmsg(DNS).place == TWO
    assert socket.recvmsg(TWO) == DNS
    socket.release()
    assert full.opened_closed(2, TWO) == (1, 1)
    assert full.opened_closed(3, TWO) == (1, 1)


def test_connected_anew_in_a_full_table(full: NativeNode) -> None:
    """A socket that has a place keeps it when it connects again."""
    socket = full.socket()
    full.kernel.tables["sockets"].entries = 2
    for _ in range(3):
        socket.connect(WEB)
    assert socket.getpeername(ONE) == WEB
    socket.release()
    assert full.opened_closed(1, ONE) == (4, 3)


def shared(node: NativeNode) -> Socket:
    """Return a socket with two frontends that have one backend."""
    socket = node.socket("udp")
    assert socket.sendmsg(DNS).place == socket.sendmsg(OTHER).place == TWO
    return socket


def test_shared_backend(serving: NativeNode) -> None:
    """If two frontends have one backend, replies show the frontend that was used last."""
    socket = shared(serving)
    assert socket.recvmsg(TWO) == OTHER
    socket.sendmsg(DNS)
    assert socket.recvmsg(TWO) == DNS
    socket.sendmsg(OTHER)
    assert socket.recvmsg(TWO) == OTHER


def test_shared_backend_moves(serving: NativeNode) -> None:
    """When the first frontend gets another backend, replies of the former one show the second
    frontend.
    """
    socket = shared(serving)
    serving.publish(2, [f"{DNS}/udp"], cluster=[THREE])
    assert socket.sendmsg(DNS).place == THREE
    assert (socket.recvmsg(THREE), socket.recvmsg(TWO)) == (DNS, OTHER)
    socket.release()
    assert serving.kernel.remembered() == dict.fromkeys(KEPT, 0)


def test_released_once(serving: NativeNode) -> None:
    """If a release and a sweep forget a socket at the same time, it is counted once."""
    for protocol, to, place, service in (("tcp", WEB, ONE, 1), ("udp", DNS, TWO, 2)):
        socket = serving.socket(protocol)
        socket.connect(to)
        forget = partial(serving.kernel.forget, socket.cookie)
        serving.kernel.afterwards["socket_places"] = [lambda: None, forget]
        socket.release()
        assert not serving.kernel.afterwards["socket_places"]
        assert not serving.kernel.sockets()
        assert serving.opened_closed(service, place) == (1, 0)
