# SPDX-License-Identifier: Apache-2.0
"""Clients that send any bytes."""

import socket
from collections.abc import Callable

from tests.serve.conftest import SECONDS, ask

OpenListener = Callable[..., int]


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


def response_to(port: int, request: bytes) -> bytes:
    """Return everything that the server sends after these bytes until it closes the connection."""
    with connect(port) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        return client.makefile("rb").read()


def is_closed(client: socket.socket) -> bool:
    """Wait for the end; return whether the server closes the connection."""
    try:
        while client.recv(1 << 20):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def serves(port: int) -> bool:
    return ask("/well", port).body == "/well"
