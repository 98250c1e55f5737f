# SPDX-License-Identifier: Apache-2.0
"""Sockets are listed, and ended one by one by their ids."""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import IPv4Address, IPv6Address

import pytest

from ebpflb.errors import KernelError
from ebpflb.kernel.node import sock_diag
from ebpflb.kernel.node.sock_diag import Connected, SockDiag
from tests.kernel.variants import needs_root

SO_COOKIE = 57
UDP, TCP = 17, 6
PLACES = {
    "v4": (socket.AF_INET, "127.0.0.1"),
    "v6": (socket.AF_INET6, "::1"),
    "mapped": (socket.AF_INET6, "::ffff:127.0.0.1"),
}

pytestmark = [
    needs_root,
    pytest.mark.skipif(not sock_diag.can_destroy(), reason="this kernel ends no sockets"),
]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[int, str]:
    return PLACES[request.param]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Open sockets, and close them at the end."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def diag() -> Iterator[SockDiag]:
    with SockDiag() as made:
        yield made


def server(opened: ExitStack, place: tuple[int, str], kind: int) -> socket.socket:
    one = opened.enter_context(socket.socket(place[0], kind))
    one.bind((place[1], 0))
    return one


def client(opened: ExitStack, there: socket.socket) -> socket.socket:
    one = opened.enter_context(socket.socket(there.family, there.type))
    one.connect(there.getsockname())
    return one


def cookie(one: socket.socket) -> int:
    return int.from_bytes(one.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), "little")


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("0.0.0.0", 0))
        return int(one.getsockname()[1])


def error_of(one: socket.socket) -> int:
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def listed(diag: SockDiag, one: socket.socket, protocol: int = UDP) -> Connected:
    (found,) = [each for each in diag.connected(protocol) if each.cookie == cookie(one)]
    return found


def test_a_connected_socket_is_listed_by_its_peers_port(
    opened: ExitStack, diag: SockDiag, place: tuple[int, str]
) -> None:
    """A connected socket is listed with both ends if its peer has the wanted port."""
    there = server(opened, place, socket.SOCK_DGRAM)
    here = client(opened, there)
    found = listed(diag, here)
    address = IPv4Address("127.0.0.1") if "127" in place[1] else IPv6Address("::1")
    assert (found.local, found.remote) == (
        (address, here.getsockname()[1]),
        (address, there.getsockname()[1]),
    )
    port = there.getsockname()[1]
    assert [each.cookie for each in diag.connected(UDP, port)] == [cookie(here)]
    assert cookie(there) not in [each.cookie for each in diag.connected(UDP)]
    assert list(diag.connected(UDP, 1)) == []


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["tcp", "udp"])
def test_the_owner_of_an_ended_socket_gets_an_error(
    opened: ExitStack, diag: SockDiag, place: tuple[int, str], kind: int
) -> None:
    """The socket's owner gets ECONNABORTED; other sockets are unaffected; the socket is ended only
    once.
    """
    protocol = TCP if kind == socket.SOCK_STREAM else UDP
    there = server(opened, place, kind)
    if protocol == TCP:
        there.listen()
    here, beside = client(opened, there), client(opened, there)
    one = listed(diag, here, protocol)
    assert diag.destroy(one)
    assert error_of(here) == errno.ECONNABORTED
    assert error_of(there) == error_of(beside) == 0
    assert not diag.destroy(one)


def test_only_by_its_cookie(opened: ExitStack, diag: SockDiag, place: tuple[int, str]) -> None:
    """A later socket with the same addresses and ports as the listed one is not ended."""
    there = server(opened, place, socket.SOCK_DGRAM)
    former = client(opened, there)
    one, port = listed(diag, former), former.getsockname()[1]
    former.close()
    later = server(opened, (place[0], place[1]), socket.SOCK_DGRAM)
    later.close()
    later = opened.enter_context(socket.socket(place[0], socket.SOCK_DGRAM))
    later.bind((place[1], port))
    later.connect(there.getsockname())
    assert listed(diag, later).id[:40] == one.id[:40]
    assert not diag.destroy(one)
    assert error_of(later) == 0
    assert listed(diag, later)


def test_two_alike(opened: ExitStack, diag: SockDiag, place: tuple[int, str]) -> None:
    """Two sockets with the same addresses and ports can each be ended, one after the other."""
    there, pair = server(opened, place, socket.SOCK_DGRAM), list[socket.socket]()
    for _ in range(2):
        one = opened.enter_context(socket.socket(place[0], socket.SOCK_DGRAM))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((place[1], pair[0].getsockname()[1] if pair else 0))
        one.connect(there.getsockname())
        pair.append(one)
    ends = [listed(diag, one) for one in pair]
    first = [diag.destroy(one) for one in ends]
    assert sorted(first) == [False, True]
    assert diag.destroy(ends[first.index(False)])
    assert [error_of(one) for one in pair] == [errno.ECONNABORTED] * 2


@pytest.mark.parametrize("fixed", [False, True])
def test_connects_anew(opened: ExitStack, diag: SockDiag, fixed: bool) -> None:
    """An ended datagram socket can be used again, and keeps a port that it had bound."""
    there = server(opened, PLACES["v4"], socket.SOCK_DGRAM)
    here = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    if fixed:
        here.bind(("0.0.0.0", free_port()))
    here.connect(there.getsockname())
    port = here.getsockname()[1]
    assert diag.destroy(listed(diag, here))
    with pytest.raises(OSError) as refusal:
        here.send(b"?")
    assert refusal.value.errno == errno.EDESTADDRREQ
    with pytest.raises(ConnectionAbortedError):
        here.recv(64, socket.MSG_DONTWAIT)
    here.connect(there.getsockname())
    here.send(b"?")
    assert there.recv(64) == b"?"
    assert not fixed or here.getsockname()[1] == port


def test_a_long_list_is_read_completely(opened: ExitStack, diag: SockDiag) -> None:
    """A list of several messages is read completely."""
    there = server(opened, PLACES["v4"], socket.SOCK_DGRAM)
    every = {cookie(client(opened, there)) for _ in range(700)}
    assert {one.cookie for one in diag.connected(UDP, there.getsockname()[1])} == every


def test_unknown_protocol(diag: SockDiag) -> None:
    """A protocol without a diag module is an error, not an empty list."""
    with pytest.raises(KernelError):
        list(diag.connected(200))
