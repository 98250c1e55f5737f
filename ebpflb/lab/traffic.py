# SPDX-License-Identifier: Apache-2.0
"""Servers and clients of the lab: a program that only imports the standard library.

    traffic.py serve NAME PORT [ADDRESS]    replies to TCP and UDP, IPv4 and IPv6: first a line
                                            with its name and the client's address, then an echo;
                                            an IPv4 address is written ::ffff:ADDRESS
    traffic.py request PROTOCOL HOST PORT N connects N times; prints the counts as a JSON object
    traffic.py await NAME HOST PORT         connects by TCP until the server NAME replies
    traffic.py gap HOST PORT                connects by TCP until nobody replies for a while, and
                                            then somebody does; prints for how many seconds

The counts: replies by the server's name, and the client's addresses that each server saw; replies
by the peer's address that the client saw; errors by the errno's name.
"""

import errno
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

_TIMEOUT = 30.0  # seconds
_SOON, _LONG = 0.1, 0.4  # seconds that a connection may take, and more than it ever takes
LONGEST = 1 << 16  # bytes of a datagram


class Reply(NamedTuple):
    """The server's name, the client's address as the server saw it, and the peer's address."""

    name: str
    source: str
    peer: str


def read(answer: bytes) -> tuple[str, str]:
    """Return the name and the client's address from a server's first line."""
    name, _, source = answer.partition(b"\n")[0].decode().rpartition(" ")
    return name, source


def serve(name: str, port: str, address: str = "::") -> None:
    """Serve forever; print "ready" when it listens."""
    stream = socket.create_server(
        (address, int(port)), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512
    )
    datagram = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    datagram.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    datagram.bind((address, int(port)))
    _in_thread(_serve_datagrams, datagram, name)
    print("ready", flush=True)
    while True:
        connection, peer = stream.accept()
        _in_thread(_converse, connection, _line(name, peer))


def _in_thread(work: Callable[..., None], *words: Any) -> None:
    threading.Thread(target=work, args=words, daemon=True).start()


def _line(name: str, peer: Any) -> bytes:
    return f"{name} {peer[0].removeprefix('::ffff:')}\n".encode()


def _converse(connection: socket.socket, line: bytes) -> None:
    """Send the first line, then echo, until the client closes the connection."""
    with suppress(OSError), connection:
        connection.sendall(line)
        while data := connection.recv(LONGEST):
            connection.sendall(data)


def _serve_datagrams(datagram: socket.socket, name: str) -> None:
    while True:
        data, peer = datagram.recvfrom(LONGEST)
        with suppress(OSError):  # an ICMP error about an earlier reply
            datagram.sendto(_line(name, peer) + data, peer)


def request_by_tcp(family: int, where: tuple[str, int]) -> Reply:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(_TIMEOUT)
        client.connect(where)
        peer = client.getpeername()[0]
        return Reply(*read(client.recv(64)), peer)


def request_by_udp(family: int, where: tuple[str, int]) -> Reply:
    """Send a request from an unconnected socket, like a resolver, which checks the address of the
    reply.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(_TIMEOUT)
        client.sendto(b"?", where)
        answer, peer = client.recvfrom(64)
        return Reply(*read(answer), peer[0])


REQUESTS = {"tcp": request_by_tcp, "udp": request_by_udp}


def send_requests(protocol: str, host: str, port: str, times: Iterable[object]) -> dict[str, Any]:
    """Connect or send a datagram for each of ``times``; return the counts of the results."""
    names, peers, errors = (Counter[str]() for _ in range(3))
    sources: dict[str, list[str]] = {}
    for _ in times:
        try:
            reply = REQUESTS[protocol](family_of(host), (host, int(port)))
        except OSError as error:
            errors[error_word(error)] += 1
        else:
            names[reply.name] += 1
            peers[reply.peer] += 1
            if reply.source not in sources.setdefault(reply.name, []):
                sources[reply.name].append(reply.source)
    shares = {"names": dict(sorted(names.items())), "sources": sources}
    return {**shares, "errors": errors, "peers": peers}


def await_name(name: str, host: str, port: str) -> None:
    """Print "ready" after the first reply; return after a reply of the server with this name."""
    answer = request_by_tcp(family_of(host), (host, int(port)))
    print("ready", flush=True)
    while answer.name != name:
        answer = request_by_tcp(family_of(host), (host, int(port)))


def gap(host: str, port: str) -> None:
    """Print "ready" after the first reply, and later the seconds of the first long silence."""
    last = None
    while True:
        with suppress(OSError), socket.create_connection((host, int(port)), _SOON) as client:
            client.recv(64)
            now = time.monotonic()
            if last is None:
                print("ready", flush=True)
            elif now - last > _LONG:
                print(f"{now - last:.1f}")
                return
            last = now
        time.sleep(_SOON / 10)


def family_of(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def error_word(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "ETIMEDOUT"
    return errno.errorcode.get(error.errno or 0, os.strerror(error.errno or 0))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", name, port, *address]:
            serve(name, port, *address)
        case ["await", name, host, port]:
            await_name(name, host, port)
        case ["gap", host, port]:
            gap(host, port)
        case ["request", protocol, host, port, count]:
            print(json.dumps(send_requests(protocol, host, port, range(int(count)))))
        case _:
            sys.exit(__doc__)
