# SPDX-License-Identifier: Apache-2.0
"""Any request, however written, gets the answer that HTTP defines."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.serve.clients import OpenListener, connect, response_to, serves


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"garbage\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"CONNECT /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"GET / HTTP/x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 101 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 10000 + b"\r\n", 431),
        (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
    ],
)
def test_garbage_is_refused(open_listener: OpenListener, request_: bytes, status: int) -> None:
    """The status says why; without Host it is 400 (RFC 9112 3.2), as by kube-proxy."""
    assert response_to(open_listener(), request_).split()[:2] == [b"HTTP/1.1", str(status).encode()]


@pytest.fixture(scope="module")
def port(open_listener: OpenListener) -> int:
    """Return the port of a listener for all examples."""
    return open_listener()


@given(some.binary(max_size=200))
def test_any_bytes(port: int, anything: bytes) -> None:
    """No input breaks the server."""
    response_to(port, anything)
    response_to(port, b"GET /" + anything + b" HTTP/1.1\r\nHost: x\r\n" + anything + b"\r\n\r\n")
    assert serves(port)


def test_half_a_request_is_not_answered(open_listener: OpenListener) -> None:
    """A client that closes in the middle of a head gets no answer."""
    assert response_to(open_listener(), b"GET / HTTP/1.1\r\nHost: x\r\n") == b""
    assert response_to(open_listener(), b"\r\n\r\n") == b""


def test_refusal_after_head(open_listener: OpenListener) -> None:
    """HEAD is answered without a body; a later refusal on the same connection has one."""
    answers = response_to(open_listener(), b"HEAD /x HTTP/1.1\r\nHost: x\r\n\r\ngarbage\r\n\r\n")
    assert answers.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\n\r\nHTTP/1.1 400 Bad Request\r\n" in answers
    assert answers.endswith(b"\r\n\r\n400 Bad Request\n")


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /x HTTP/1.0\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nsome of it",
        b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n",
    ],
)
def test_connection_is_ended_after_the_answer(open_listener: OpenListener, request_: bytes) -> None:
    """The connection is closed if the client asks, and after a body, which is not read."""
    with connect(open_listener()) as client:
        client.sendall(request_)
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nConnection: close\r\n" in answer
    assert answer.endswith(b"\r\n\r\n/x")


def test_leading_slashes_are_one(open_listener: OpenListener) -> None:
    """Several leading slashes count as one: a path may have been joined to a base URL that ends in
    a slash.
    """
    request = b"GET //well HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert response_to(open_listener(), request).endswith(b"\r\n\r\n/well")
