# SPDX-License-Identifier: Apache-2.0
"""http_get: the answer of a server on this node."""

from collections.abc import Iterator
from contextlib import closing
from socket import SHUT_WR, socket, socketpair

import pytest

from ebpflb.http_get import get


@pytest.fixture
def pair() -> Iterator[tuple[socket, socket]]:
    """The client's and the server's socket."""
    client, server = socketpair()
    client.settimeout(0.2)
    with closing(client), closing(server):
        yield client, server


def test_answer(pair: tuple[socket, socket]) -> None:
    """The path is asked for; the body is everything behind the head, empty lines included."""
    client, server = pair
    server.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 8\r\n\r\nno\r\n\r\nit")
    server.shutdown(SHUT_WR)
    assert get(client, "/v1/service?name=a") == (404, b"no\r\n\r\nit")
    assert server.recv(4096) == b"GET /v1/service?name=a HTTP/1.0\r\n\r\n"


def test_long_answer(pair: tuple[socket, socket]) -> None:
    """No more is read than is asked for; the rest is not waited for."""
    client, server = pair
    server.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 100)
    assert get(client, "/", 23) == (200, b"xxxx")


@pytest.mark.parametrize("said", [b"", b"SSH-2.0\r\n", b"HTTP/1.1 2000 OK\r\n\r\n", b"HTTP/1.1"])
def test_other_answers(said: bytes, pair: tuple[socket, socket]) -> None:
    """What is not HTTP is an error of its own, not one of the connection."""
    client, server = pair
    server.sendall(said)
    server.shutdown(SHUT_WR)
    with pytest.raises(ValueError, match="not HTTP"):
        get(client, "/")


def test_silence(pair: tuple[socket, socket]) -> None:
    """A server that does not answer ends with the socket's timeout."""
    with pytest.raises(TimeoutError):
        get(pair[0], "/")
