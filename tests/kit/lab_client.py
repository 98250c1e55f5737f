# SPDX-License-Identifier: Apache-2.0
"""Clients on a test cluster's hosts; a program that only imports the standard library and traffic.

lab_client.py LAB request PROTOCOL HOST PORT N  as of traffic.py, in the folder LAB of the lab;
                                                PROTOCOL may be connected-udp as well
lab_client.py LAB repeat PROTOCOL HOST PORT S   the same until its input ends, with pauses of S
                                                seconds; prints "ready" after the first one
lab_client.py LAB echo HOST PORT BYTES N        connects N times, each time sends as many bytes
                                                and reads the echo; prints a name a line
"""

import json
import os
import selectors
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

TIMEOUT = 30.0  # seconds


def until_input_ends(pause: float) -> Iterator[None]:
    """Yield at once, then after each pause; say "ready" after the first time."""
    yield
    print("ready", flush=True)
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        while not selector.select(pause):
            yield


def request_by_connected_udp(traffic: Any, family: int, where: tuple[str, int]) -> Any:
    """Ask with a connected socket, which takes replies of one peer alone."""
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(TIMEOUT)
        client.connect(where)
        client.send(b"?")
        return traffic.Reply(*traffic.read(client.recv(64)), client.getpeername()[0])


def echo(traffic: Any, host: str, port: str, size: str) -> str:
    """Return the server's name. Raises OSError, or ValueError if the echo differs."""
    sent = os.urandom(int(size))
    with socket.create_connection((host, int(port)), TIMEOUT) as client:
        stream = client.makefile("rb")
        name, _ = traffic.read(stream.readline())
        threading.Thread(target=client.sendall, args=(sent,), daemon=True).start()
        if stream.read(len(sent)) != sent:
            raise ValueError(f"{len(sent)} bytes came back changed")
        return str(name)


def main(lab: str, command: str, *words: str) -> None:
    sys.path.insert(0, lab)
    traffic: Any = __import__("traffic")
    traffic.REQUESTS["connected-udp"] = lambda *to: request_by_connected_udp(traffic, *to)
    if command == "echo":
        *where, count = words
        for _ in range(int(count)):
            print(echo(traffic, *where))
        return
    *asked, last = words
    times = until_input_ends(float(last)) if command == "repeat" else range(int(last))
    print(json.dumps(traffic.send_requests(*asked, times)))


if __name__ == "__main__":
    main(*sys.argv[1:])
