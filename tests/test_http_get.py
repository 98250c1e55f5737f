# SPDX-License-Identifier: Apache-2.0
"""One GET over a socket, answered well and badly."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket, socketpair
from threading import Thread

import pytest

from ebpflb import http_get

SECONDS = 5.0
LIMIT = 1000


@contextmanager
def answering(*parts: bytes) -> Iterator[socket]:
    """A socket whose other end answers a request with these parts."""
    here, there = socketpair()

    def answer() -> None:
        there.recv(4096)
        for part in parts:
            there.send(part)
        there.close()

    thread = Thread(target=answer)
    thread.start()
    try:
        with here:
            yield here
    finally:
        thread.join()


def get(opened: socket, seconds: float = SECONDS) -> tuple[int, bytes]:
    return http_get.get(opened, "/", seconds, LIMIT)


def test_the_request() -> None:
    """It asks for the path by HTTP/1.0, so that the server closes."""
    here, there = socketpair()
    with here, there:
        there.send(b"HTTP/1.0 200 OK\r\n\r\n")
        there.shutdown(1)
        http_get.get(here, "/v1/pulse?a=b", SECONDS, LIMIT)
        assert there.recv(4096).startswith(b"GET /v1/pulse?a=b HTTP/1.0\r\n")


def test_in_parts() -> None:
    """The status, and the body without the head."""
    with answering(
        b"HTTP/1.1 40", b"4 Not Found\r\nA: b\r", b"\n\r\nno\r\n", b"\r\n thing"
    ) as opened:
        assert get(opened) == (404, b"no\r\n\r\n thing")


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0\r\n", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 2000 \r\n"]
)
def test_other_answers(answer: bytes) -> None:
    """What is not HTTP/1 is said to be none."""
    with answering(answer) as opened, pytest.raises(http_get.NoHttp):
        get(opened)


def test_an_answer_that_ends_too_early() -> None:
    """Half of it is none: its server was ended meanwhile."""
    head = b"HTTP/1.1 200 OK\r\nA: b\r\nContent-Length: 3\r\n\r\n"
    with answering(head, b"yes") as opened:
        assert get(opened) == (200, b"yes")
    with answering(head, b"ye") as opened, pytest.raises(ConnectionError, match="too early"):
        get(opened)


def test_no_more_than_the_limit() -> None:
    """The rest is not read."""
    head = b"HTTP/1.0 200 OK\r\n\r\n"
    with answering(head, b"x" * 2 * LIMIT) as opened:
        assert get(opened) == (200, b"x" * (LIMIT - len(head)))


@pytest.mark.parametrize("parts", [(), (b"H", b"T", b"T", b"P") * 20], ids=["silent", "slow"])
def test_late_answers(parts: tuple[bytes, ...]) -> None:
    """All of it has to arrive in time, not each part."""
    here, there = socketpair()
    sending = Thread(target=lambda: _send_slowly(there, parts))
    with here, there:
        sending.start()
        with pytest.raises(TimeoutError):
            get(here, 0.1)
        here.close()
        sending.join()


def _send_slowly(there: socket, parts: tuple[bytes, ...]) -> None:
    try:
        for part in parts:
            there.send(part)
            time.sleep(0.01)
    except OSError:
        return  # the other end is closed
