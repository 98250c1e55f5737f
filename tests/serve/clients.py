# SPDX-License-Identifier: Apache-2.0
"""Clients that say what they like, byte by byte."""

import socket
from collections.abc import Callable

from tests.serve.conftest import SECONDS, ask

OpenListener = Callable[..., int]


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


def said(port: int, request: bytes) -> bytes:
    """All that comes back to these bytes, until the server ends the connection."""
    with connect(port) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        return client.makefile("rb").read()


def asks(client: socket.socket) -> None:
    """A request on a connection that is kept, and its answer."""
    client.sendall(b"GET /kept HTTP/1.1\r\nHost: x\r\n\r\n")
    assert client.recv(4096).endswith(b"/kept")


def ended(client: socket.socket) -> bool:
    """Whether the server has ended the connection; waits for it."""
    try:
        while client.recv(1 << 20):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def is_well(port: int) -> bool:
    return ask("/well", port).body == "/well"
