# SPDX-License-Identifier: Apache-2.0
"""Requests that a socket of the lab sends to a service: each returns which backend answered."""

from collections import Counter
from collections.abc import Callable
from socket import AF_INET, AF_INET6, SOCK_DGRAM, SOCK_STREAM
from typing import NamedTuple

from ebpflb.lab import traffic
from tests.kit.cluster import PORT
from tests.kit.sockets import Socket, Sockets


class Answer(NamedTuple):
    """The backend's name, the peer that the client saw, the source that the backend saw."""

    name: str
    peer: tuple[str, int]
    source: str


Send = Callable[..., Answer]


def family_of(host: str) -> int:
    return AF_INET6 if ":" in host else AF_INET


def tcp_socket(sockets: Sockets, host: str) -> Socket:
    return sockets.open(family_of(host), SOCK_STREAM)


def udp_socket(sockets: Sockets, host: str) -> Socket:
    return sockets.open(family_of(host), SOCK_DGRAM)


def socket_of(send: "Send", sockets: Sockets, host: str) -> Socket:
    """Return a socket of ``send``'s protocol, for a host of this family."""
    return (tcp_socket if send is tcp else udp_socket)(sockets, host)


def connected(sockets: Sockets, host: str, port: int) -> tuple[Socket, str]:
    """Return an open TCP connection, and the name of its backend."""
    client = tcp_socket(sockets, host)
    client.connect((host, port))
    return client, traffic.read(client.recv(64))[0]


def lives(client: Socket, word: bytes = b"still there?") -> bool:
    """Whether the backend of an open connection echoes."""
    client.send(word)
    return bool(client.recv(64) == word)


def tcp(sockets: Sockets, host: str, port: int = PORT) -> Answer:
    with tcp_socket(sockets, host) as client:
        client.connect((host, port))
        peer = client.getpeername()[:2]
        return _answer(client.recv(64), peer)


def udp(sockets: Sockets, host: str, port: int = PORT) -> Answer:
    """Send a request from an unconnected socket; the peer in the answer is that of recvfrom."""
    with udp_socket(sockets, host) as client:
        return exchange(client, host, port)


def connected_udp(sockets: Sockets, host: str, port: int = PORT) -> Answer:
    with udp_socket(sockets, host) as client:
        client.connect((host, port))
        client.send(b"?")
        answer = receive(client)
        assert answer.peer == client.getpeername()[:2], "recvfrom and getpeername must agree"
        return answer


def exchange(client: Socket, host: str, port: int = PORT) -> Answer:
    """Send a datagram from an unconnected socket; return its answer."""
    client.sendto(b"?", (host, port))
    return receive(client)


def receive(client: Socket) -> Answer:
    said, sender = client.recvfrom(64)
    return _answer(said, sender[:2])


def _answer(said: bytes, peer: tuple[str, int]) -> Answer:
    name, source = traffic.read(said)
    return Answer(name, peer, source)


KINDS: dict[str, Send] = {"tcp": tcp, "udp": udp, "connected-udp": connected_udp}


def backends(
    sockets: Sockets, host: str, times: int = 40, send: Send = tcp, port: int = PORT
) -> Counter[str]:
    """Count the answers of each backend. If there are three backends, 40 requests miss one of them
    once in 4 million times.
    """
    return Counter(send(sockets, host, port).name for _ in range(times))


def fragmented(sockets: Sockets, host: str, port: int = PORT, size: int = 2000) -> Answer:
    """Send a datagram in fragments, and receive it back in fragments."""
    with udp_socket(sockets, host) as client:
        return exchange_fragmented(client, host, port, size)


def exchange_fragmented(client: Socket, host: str, port: int = PORT, size: int = 2000) -> Answer:
    sent = b"\xa5" * size
    client.sendto(sent, (host, port))
    said, sender = client.recvfrom(2 * size)
    assert said.partition(b"\n")[2] == sent
    return _answer(said, sender[:2])


def is_answered(send: Send, sockets: Sockets, where: tuple[str, int], seconds: float) -> bool:
    """Whether TCP or connected UDP gets an answer in time. Raises OSError if refused."""
    with socket_of(send, sockets, where[0]) as client:
        client.settimeout(seconds)
        try:
            client.connect(where)
            client.send(b"?")
            return bool(client.recv(64))
        except TimeoutError:
            return False
