# SPDX-License-Identifier: Apache-2.0
"""Sockets whose cookies lead to the same place: each is remembered, once."""

from functools import partial

import pytest

from ebpflb.kernel.maps.layout import MAPS
from tests.native.node import NativeNode, Socket

PLACES = MAPS["socket_places"].entries
WEB, DNS, OTHER = "172.30.0.1:80", "172.30.0.10:53", "172.30.0.11:53"
ONE, TWO = "10.1.0.1:8080", "10.1.0.2:53"
WHERE = {"tcp": (WEB, ONE, 1), "udp": (DNS, TWO, 2)}

both_protocols = pytest.mark.parametrize("protocol", WHERE)


@pytest.fixture
def serving(node: NativeNode) -> NativeNode:
    node.publish(1, [f"{WEB}/tcp"], cluster=[ONE])
    node.publish(2, [f"{DNS}/udp"], cluster=[TWO])
    node.publish(3, [f"{OTHER}/udp"], cluster=[TWO])
    return node


def pair(node: NativeNode, protocol: str) -> tuple[Socket, Socket]:
    """Return two sockets with the same place."""
    one, other = node.socket(protocol), node.socket(protocol)
    other.cookie = one.cookie + PLACES
    return one, other


def elsewhere(node: NativeNode) -> int:
    """Return how many sockets are in the hash, by the programs' counter and by its entries."""
    *_, counted = node.kernel.get("sockets_full", 0)
    assert len(node.kernel.items("sockets")) == counted
    return int(counted)


def sees(socket: Socket, protocol: str) -> str:
    """Return the peer that a connected socket shows."""
    _, place, _ = WHERE[protocol]
    return socket.getpeername(place) if protocol == "tcp" else socket.recvmsg(place)


@both_protocols
def test_two_sockets_with_one_place(serving: NativeNode, protocol: str) -> None:
    """The second socket is in the hash; each keeps its frontend until it is released."""
    frontend, place, service = WHERE[protocol]
    one, other = pair(serving, protocol)
    for socket in (one, other):
        assert socket.connect(frontend).place == place
    assert elsewhere(serving) == 1
    assert [sees(it, protocol) for it in (one, other)] == [frontend] * 2
    one.release()
    assert sees(other, protocol) == frontend
    other.release()
    assert elsewhere(serving) == 0
    assert not any(serving.kernel.remembered().values())
    assert serving.opened_closed(service, place) == (2, 2)


@both_protocols
def test_place_that_gets_free(serving: NativeNode, protocol: str) -> None:
    """A socket in the hash that connects again has one entry, though its place is free now."""
    frontend, place, service = WHERE[protocol]
    one, other = pair(serving, protocol)
    one.connect(frontend)
    other.connect(frontend)
    one.release()
    other.connect(frontend)
    assert serving.kernel.remembered() == {"sockets": 1, "assignments": 0, "peers": 0}
    other.release()
    assert elsewhere(serving) == 0
    opened, closed = serving.opened_closed(service, place)
    assert opened == closed


@both_protocols
def test_place_that_is_taken_meanwhile(serving: NativeNode, protocol: str) -> None:
    """If another CPU takes the place after it was looked up, the socket is in the hash."""
    frontend, _, _ = WHERE[protocol]
    one, other = pair(serving, protocol)
    one.connect(frontend)
    (place,) = [it for _, it in serving.kernel.tables["socket_places"].items() if it.socket]
    one.release()
    key = one.cookie % PLACES
    serving.kernel.afterwards["socket_places"] = [
        partial(serving.kernel.put, "socket_places", key, place)
    ]
    other.connect(frontend)
    assert not serving.kernel.afterwards["socket_places"]
    assert elsewhere(serving) == 1
    assert [sees(it, protocol) for it in (one, other)] == [frontend] * 2


def test_place_of_a_datagram_socket_gets_another_backend(serving: NativeNode) -> None:
    """A further datagram to the same frontend replaces the entry where it is stored, place or
    hash.
    """
    sockets = pair(serving, "udp")
    for socket in sockets:
        socket.sendmsg(DNS)
    serving.publish(2, [f"{DNS}/udp"], cluster=["10.1.0.3:53"])
    for socket in sockets:
        assert socket.sendmsg(DNS).place == "10.1.0.3:53"
        assert socket.recvmsg("10.1.0.3:53") == DNS
    assert elsewhere(serving) == 1
    for socket in sockets:
        socket.release()
    assert elsewhere(serving) == 0
    assert serving.opened_closed(2, TWO) == serving.opened_closed(2, "10.1.0.3:53") == (2, 2)


CLAIMED = 1 << 62  # PLACE_CLAIMED


@pytest.mark.parametrize("whose", ["own", "another's"])
@both_protocols
def test_a_place_that_is_being_written(serving: NativeNode, protocol: str, whose: str) -> None:
    """A socket whose own entry another thread is writing gets no second one in the hash; a place
    that another socket has claimed is taken.
    """
    if not serving.kernel.names_errno:
        pytest.skip("this variant has the lock")
    frontend, place, _ = WHERE[protocol]
    one, other = pair(serving, protocol)
    number = one.cookie % PLACES
    entry = serving.kernel.get("socket_places", number)
    claim = (one if whose == "own" else other).cookie ^ CLAIMED
    serving.kernel.put("socket_places", number, entry._replace(socket=claim))
    assert one.connect(frontend).place == place
    assert elsewhere(serving) == (whose != "own")
    assert serving.kernel.get("socket_places", number).socket == claim
