# SPDX-License-Identifier: Apache-2.0
"""Ways to ask a service from a socket of the lab: each gives who answered, and as whom."""

from collections import Counter
from collections.abc import Callable
from socket import AF_INET, AF_INET6, SOCK_DGRAM, SOCK_STREAM, socket
from typing import NamedTuple

from ebpflb.lab.sockets import Socket, Sockets
from tests.network.cluster import PORT

MPTCP = 262


class Answer(NamedTuple):
    """Who answered, and the address and port that the client saw as its peer."""

    name: str
    peer: tuple[str, int]


Ask = Callable[..., Answer]


def family_of(host: str) -> int:
    return AF_INET6 if ":" in host else AF_INET


def stream(sockets: Sockets, host: str, protocol: int = 0) -> Socket:
    return sockets.open(family_of(host), SOCK_STREAM, protocol)


def datagram(sockets: Sockets, host: str) -> Socket:
    return sockets.open(family_of(host), SOCK_DGRAM)


def is_mptcp_here() -> bool:
    try:
        socket(AF_INET, SOCK_STREAM, MPTCP).close()
    except OSError:
        return False
    return True


def tcp(sockets: Sockets, host: str, port: int = PORT, protocol: int = 0) -> Answer:
    with stream(sockets, host, protocol) as client:
        client.connect((host, port))
        peer = client.getpeername()[:2]
        return Answer(client.recv(64).decode(), peer)


def mptcp(sockets: Sockets, host: str, port: int = PORT) -> Answer:
    return tcp(sockets, host, port, MPTCP)


def udp(sockets: Sockets, host: str, port: int = PORT) -> Answer:
    """Unconnected: the answer's sender is what recvfrom shows."""
    with datagram(sockets, host) as client:
        return again(client, host, port)


def connected_udp(sockets: Sockets, host: str, port: int = PORT) -> Answer:
    with datagram(sockets, host) as client:
        client.connect((host, port))
        client.send(b"?")
        name, sender = client.recvfrom(64)
        assert sender == client.getpeername(), "recvfrom and getpeername must agree"
        return Answer(name.decode(), sender[:2])


def again(client: Socket, host: str, port: int = PORT) -> Answer:
    """Once more from an unconnected socket."""
    client.sendto(b"?", (host, port))
    name, sender = client.recvfrom(64)
    return Answer(name.decode(), sender[:2])


ASKS: dict[str, Ask] = {"tcp": tcp, "udp": udp, "connected-udp": connected_udp}


def names(
    sockets: Sockets, host: str, times: int = 40, ask: Ask = tcp, port: int = PORT
) -> Counter[str]:
    """How often each endpoint answered; 40 asks miss one of three once in 4 million times."""
    return Counter(ask(sockets, host, port).name for _ in range(times))
