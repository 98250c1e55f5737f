# SPDX-License-Identifier: Apache-2.0
"""Datagram sockets: one backend for each frontend while the backend serves; nothing is left after
release.
"""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.native.node import NativeNode, Socket

DNS = "172.30.0.10:53/udp"
ADDRESS = "172.30.0.10:53"
MANY = [f"10.1.0.{n}:53" for n in range(1, 101)]
CHAIN = 17  # the socket's own entry, and the list (ASSIGNMENTS)


@pytest.fixture
def dns(node: NativeNode) -> NativeNode:
    node.publish(1, [DNS], cluster=MANY)
    return node


def test_a_sockets_datagrams_keep_their_backend(dns: NativeNode) -> None:
    """A socket's datagrams to one frontend go to one backend: one flow, one choice."""
    socket = dns.socket("udp")
    home = socket.sendmsg(ADDRESS).place
    assert {socket.sendmsg(ADDRESS).place for _ in range(20)} == {home}
    assert dns.opened_closed(1, home) == (1, 0)
    assert dns.kernel.get("service_stats", 1).chosen == 1
    assert dns.counted() == {"translated": 21}


def test_connect_and_send_agree(dns: NativeNode) -> None:
    """A connect of a datagram socket and a send from it belong to the same flow."""
    socket = dns.socket("udp")
    home = socket.connect(ADDRESS).place
    assert socket.sendmsg(ADDRESS).place == socket.connect(ADDRESS).place == home
    assert dns.opened_closed(1, home) == (1, 0)


def test_sockets_are_separate(dns: NativeNode) -> None:
    """Each socket makes its own choice."""
    assert len({dns.socket("udp").sendmsg(ADDRESS).place for _ in range(50)}) > 10


def test_moved_when_gone(dns: NativeNode) -> None:
    """If a backend is removed its flow moves to another backend, and answers of the removed one are
    ignored.
    """
    socket = dns.socket("udp")
    home = socket.sendmsg(ADDRESS).place
    dns.publish(1, [DNS], cluster=[backend for backend in MANY if backend != home])
    moved = socket.sendmsg(ADDRESS).place
    assert moved != home
    assert (dns.opened_closed(1, home), dns.opened_closed(1, moved)) == ((1, 1), (1, 0))
    assert socket.recvmsg(home) == home
    assert socket.recvmsg(moved) == ADDRESS


def test_moved_with_the_frontend(dns: NativeNode) -> None:
    """The flows of a frontend that another service gets move to that service."""
    socket = dns.socket("udp")
    home = socket.sendmsg(ADDRESS).place
    dns.publish(2, [DNS], cluster=[home])
    assert socket.sendmsg(ADDRESS).place == home
    assert (dns.opened_closed(1, home), dns.opened_closed(2, home)) == ((1, 1), (1, 0))
    assert socket.recvmsg(home) == ADDRESS


def test_id_given_again(dns: NativeNode) -> None:
    """If another service gets a backend's id, the id no longer means the former backend."""
    socket = dns.socket("udp")
    home = socket.sendmsg(ADDRESS).place
    dns.ids[2, "10.9.0.1:53"] = dns.backend_id(1, home)
    dns.publish(2, [DNS], cluster=["10.9.0.1:53", "10.9.0.2:53"])
    dns.kernel.dice = lambda: 0xFFFFFFFF
    assert socket.sendmsg(ADDRESS).place == "10.9.0.2:53"
    assert socket.recvmsg(home) == home


def test_slot_given_again(dns: NativeNode) -> None:
    """A backend is gone if its slot has another backend of the service."""
    socket = dns.socket("udp")
    home = socket.sendmsg(ADDRESS).place
    other = next(backend for backend in MANY if backend != home)
    dns.publish(1, [DNS], cluster=[other])
    slot = dns.kernel.get("backend_slots", dns.backend_id(1, other))
    dns.kernel.put("backend_slots", dns.backend_id(1, home), slot)
    assert socket.sendmsg(ADDRESS).place == other
    assert dns.opened_closed(1, home) == (1, 1)


def test_gone_without_another(dns: NativeNode) -> None:
    """After the last backend is removed, the next datagram is refused and the flow waits."""
    socket = dns.socket("udp")
    home = socket.sendmsg(ADDRESS).place
    dns.publish(1, [DNS])
    assert socket.sendmsg(ADDRESS).place not in MANY
    dns.publish(1, [DNS], cluster=[home])
    assert socket.sendmsg(ADDRESS).place == home
    socket.release()
    assert dns.opened_closed(1, home) == (1, 1)


def frontends(count: int) -> list[str]:
    return [f"172.30.1.{n}:53/udp" for n in range(count)]


def send(socket: Socket, index: int) -> str:
    return socket.sendmsg(f"172.30.1.{index}:53").place


def left(node: NativeNode) -> int:
    return sum(node.kernel.remembered().values())


@pytest.mark.parametrize("count", [1, 2, CHAIN])
def test_a_released_socket_has_no_flows(node: NativeNode, count: int) -> None:
    """The release of a socket forgets all its flows, up to the chain's length."""
    node.publish(1, frontends(count), cluster=MANY)
    socket = node.socket("udp")
    for index in range(count):
        send(socket, index)
    assert len(node.kernel.items("assignments")) == count - 1
    socket.release()
    assert left(node) == 0
    closed = [counters.closed for counters in node.kernel.items("backend_stats").values()]
    assert sum(closed) == count


@pytest.mark.parametrize("scheduler", [(), ("least_connections",)], ids=["random", "least"])
def test_two_threads_of_a_socket(node: NativeNode, scheduler: tuple[str, ...]) -> None:
    """If two threads send to the same new frontend at once, the socket's list gets it once.

    The release then finds all frontends, and each flow is counted once.
    """
    node.publish(1, dict.fromkeys(frontends(3), " ".join(scheduler)), cluster=MANY)
    socket = node.socket("udp")
    send(socket, 0)
    send(socket, 1)

    def send_beside() -> None:
        send(socket, 2)

    node.kernel.afterwards["assignments"] = [lambda: None, send_beside]
    send(socket, 2)
    assert len(node.kernel.items("assignments")) == 2
    socket.release()
    assert not node.kernel.items("assignments")
    assert not node.kernel.items("connections")
    counters = node.kernel.items("backend_stats").values()
    assert [sum(it.opened for it in counters), sum(it.closed for it in counters)] == [3, 3]
    assert not any(load.open for load in node.kernel.items("backend_loads").values())


def test_release_beyond_the_chain(node: NativeNode) -> None:
    """If a socket has too many frontends, the oldest ones stay until the LRU evicts them."""
    node.publish(1, frontends(CHAIN + 3), cluster=MANY)
    socket = node.socket("udp")
    for index in range(CHAIN + 3):
        send(socket, index)
    socket.release()
    oldest = {str(sender.frontend) for sender in node.kernel.items("assignments")}
    assert oldest == {f"172.30.1.{index}:53" for index in range(1, 4)}


def test_release_spares_others(dns: NativeNode) -> None:
    """The release of a socket affects no other socket."""
    stays, goes = dns.socket("udp"), dns.socket("udp")
    home = stays.sendmsg(ADDRESS).place
    goes.sendmsg(ADDRESS)
    goes.release()
    assert stays.sendmsg(ADDRESS).place == home
    assert left(dns) == 1


def test_release_of_an_unknown_socket(dns: NativeNode) -> None:
    """The release of a socket that used no service changes nothing."""
    dns.socket("udp").release()
    assert dns.counted() == {}


def test_forgotten_link(node: NativeNode) -> None:
    """If the LRU evicts an assignment in the chain, the chain ends there, even if the assignment is
    made again.
    """
    node.publish(1, frontends(4), cluster=MANY)
    socket = node.socket("udp")
    for index in range(4):
        send(socket, index)
    middle = next(s for s in node.kernel.items("assignments") if str(s.frontend) == "172.30.1.2:53")
    node.kernel.drop("assignments", middle)
    send(socket, 2)
    socket.release()
    assert [str(s.frontend) for s in node.kernel.items("assignments")] == ["172.30.1.1:53"]


STEPS = some.lists(
    some.tuples(some.integers(0, 1), some.integers(0, 5), some.sets(some.integers(0, 7))),
    max_size=25,
)


@given(steps=STEPS)
def test_any_life(
    new_node: Callable[[], NativeNode], steps: list[tuple[int, int, set[int]]]
) -> None:
    """Releases leave no entry, whatever two sockets send while backends change."""
    node = new_node()
    sockets = [node.socket("udp"), node.socket("udp")]
    for sender, index, backends in steps:
        node.publish(1, frontends(6), cluster=[MANY[n] for n in sorted(backends)])
        send(sockets[sender], index)
    for socket in sockets:
        socket.release()
    assert left(node) == 0
    for backend in MANY[:8]:
        opened, closed = node.opened_closed(1, backend)
        assert opened == closed
