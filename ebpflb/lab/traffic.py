# SPDX-License-Identifier: Apache-2.0
"""Servers and clients of the lab, a program of its own; the standard library alone.

    traffic.py serve NAME PORT              answers TCP and UDP, IPv4 and IPv6, with NAME;
                                            a TCP connection then hears its own words
    traffic.py ask PROTOCOL HOST PORT N     asks N times; prints what came as one JSON object
    traffic.py press PROTOCOL HOST PORT     the same until its input ends
    traffic.py await NAME HOST PORT         asks by TCP until NAME answers

The answer counts, by name, who answered; by errno's name, what failed; and, by address, whom
the client saw as its peer.
"""

import errno
import json
import os
import select
import selectors
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

TIMEOUT = 3.0  # seconds


def serve(name: str, port: str) -> None:
    """For ever; says "ready" when it can be asked."""
    stream = socket.create_server(
        ("::", int(port)), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512
    )
    datagram = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    datagram.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    datagram.bind(("::", int(port)))
    threading.Thread(target=_serve_datagrams, args=(datagram, name), daemon=True).start()
    print("ready", flush=True)
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is stream:
                    connection, _ = stream.accept()
                    connection.sendall(name.encode())
                    selector.register(connection, selectors.EVENT_READ)
                else:
                    _echo(selector, key.fileobj)


def _echo(selector: selectors.BaseSelector, connection: Any) -> None:
    """Says what it hears; hangs up when the client does."""
    try:
        heard = connection.recv(2048)
        connection.sendall(heard)
    except OSError:
        heard = b""
    if not heard:
        selector.unregister(connection)
        connection.close()


def _serve_datagrams(datagram: socket.socket, name: str) -> None:
    while True:
        _, peer = datagram.recvfrom(2048)
        datagram.sendto(name.encode(), peer)


def ask_tcp(family: int, where: tuple[str, int]) -> tuple[str, str]:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(TIMEOUT)
        client.connect(where)
        peer = client.getpeername()[0]
        return client.recv(64).decode(), peer


def ask_udp(family: int, where: tuple[str, int]) -> tuple[str, str]:
    """Unconnected: a resolver checks that the answer comes from where it asked."""
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(TIMEOUT)
        client.sendto(b"?", where)
        answer, peer = client.recvfrom(64)
        return answer.decode(), peer[0]


def ask_connected_udp(family: int, where: tuple[str, int]) -> tuple[str, str]:
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(TIMEOUT)
        client.connect(where)
        client.send(b"?")
        return client.recv(64).decode(), client.getpeername()[0]


ASK = {"tcp": ask_tcp, "udp": ask_udp, "connected-udp": ask_connected_udp}


def ask(protocol: str, host: str, port: str, times: Iterable[object]) -> dict[str, dict[str, int]]:
    """Counts over a connection or datagram for each of ``times``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    names: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    peers: Counter[str] = Counter()
    for _ in times:
        try:
            name, peer = ASK[protocol](family, (host, int(port)))
        except OSError as error:
            errors[_word(error)] += 1
        else:
            names[name] += 1
            peers[peer] += 1
    return {"names": dict(sorted(names.items())), "errors": errors, "peers": peers}


def until_input_ends() -> Iterator[None]:
    while not select.select([sys.stdin], [], [], 0)[0]:
        yield


def await_name(name: str, host: str, port: str) -> None:
    """Says "ready" after its first answer; ends with the one that is looked for."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    answer, _ = ask_tcp(family, (host, int(port)))
    print("ready", flush=True)
    while answer != name:
        answer, _ = ask_tcp(family, (host, int(port)))


def _word(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "ETIMEDOUT"
    return errno.errorcode.get(error.errno or 0, os.strerror(error.errno or 0))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", name, port]:
            serve(name, port)
        case ["await", name, host, port]:
            await_name(name, host, port)
        case ["ask", protocol, host, port, count]:
            print(json.dumps(ask(protocol, host, port, range(int(count)))))
        case ["press", protocol, host, port]:
            print(json.dumps(ask(protocol, host, port, until_input_ends())))
        case _:
            sys.exit(__doc__)
