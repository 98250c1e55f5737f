# SPDX-License-Identifier: Apache-2.0
"""A program that only imports the standard library: connections that their server closes first.

short_connections.py serve PORT                   sends a byte and closes; prints "ready" before
short_connections.py ask COUNT HOST:PORT...       connects to each in turn, COUNT times in all;
                                                  prints how many SYNs the kernel sent again
"""

import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path

TIMEOUT = 10.0  # seconds


def place(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def serve(port: str) -> None:
    with socket.create_server(("", int(port)), backlog=512) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            with suppress(OSError), connection:
                connection.send(b"!")


def syns_sent_again() -> int:
    lines = [line.split() for line in Path("/proc/net/netstat").read_text().splitlines()]
    pairs = (
        zip(names, values, strict=True)
        for names, values in zip(lines[::2], lines[1::2], strict=True)
    )
    numbers = {name: value for pair in pairs for name, value in pair}
    return int(numbers["TCPSynRetrans"])


def ask(count: str, *places: str) -> None:
    before = syns_sent_again()
    for where in islice(cycle(map(place, places)), int(count)):
        with socket.create_connection(where, TIMEOUT) as client:
            while client.recv(64):
                pass
    print(syns_sent_again() - before)


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"serve": serve, "ask": ask}
    commands[sys.argv[1]](*sys.argv[2:])
