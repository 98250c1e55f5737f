# SPDX-License-Identifier: Apache-2.0
"""A client under load: it begins a connection every few milliseconds, whatever becomes of others.

    load_client.py HOST PORT PAUSE PATIENCE

Prints "ready" after the first answer. When its input ends it waits for what is open, and prints a
JSON list: when each connection began (CLOCK_MONOTONIC), and the server's name, "" if it failed: if
it was not answered in PATIENCE seconds. It only imports the standard library.
"""

import json
import selectors
import socket
import sys
import time
from contextlib import suppress


class Client:
    """``results`` are the connections that have ended."""

    def __init__(self, host: str, port: int, patience: float) -> None:
        self._where, self._patience = (host, port), patience
        self._selector = selectors.DefaultSelector()
        self._open: dict[socket.socket, float] = {}
        self.results: list[tuple[float, str]] = []

    def begin(self) -> None:
        client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        client.setblocking(False)
        self._open[client] = time.monotonic()
        with suppress(BlockingIOError):
            client.connect(self._where)
        self._selector.register(client, selectors.EVENT_READ)

    def wait(self, seconds: float) -> None:
        """Takes the answers that come in so many seconds, and ends what has waited too long."""
        for key, _ in self._selector.select(max(seconds, 0.0)):
            found: socket.socket = key.fileobj  # type: ignore[assignment]
            try:
                self._end(found, found.recv(64).partition(b" ")[0].decode())
            except OSError:
                self._end(found, "")
        now = time.monotonic()
        for each in [it for it, begun in self._open.items() if now - begun > self._patience]:
            self._end(each, "")

    def wait_for(self, seconds: float) -> None:
        """Call ``wait`` for all of this time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.wait(left)

    @property
    def is_waiting(self) -> bool:
        return bool(self._open)

    def _end(self, client: socket.socket, name: str) -> None:
        self._selector.unregister(client)
        self.results.append((self._open.pop(client), name))
        client.close()


def main(host: str, port: str, pause: str, patience: str) -> None:
    client = Client(host, int(port), float(patience))
    is_ready = False
    with selectors.DefaultSelector() as given:
        given.register(sys.stdin, selectors.EVENT_READ)
        while not given.select(0):
            client.begin()
            client.wait_for(float(pause))
            if client.results and not is_ready:
                is_ready = True
                print("ready", flush=True)
    while client.is_waiting:
        client.wait(0.1)
    print(json.dumps(sorted(client.results)))


if __name__ == "__main__":
    main(*sys.argv[1:])
