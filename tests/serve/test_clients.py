# SPDX-License-Identifier: Apache-2.0
"""Whatever a client does, the server keeps running and answers other clients."""

import asyncio
import errno
import gc
import socket
import time
from contextlib import ExitStack
from typing import Any

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.serve import listener
from ebpflb.serve.listener import Connections, Listener, ServerThread, listen
from tests.serve.answers import RELEASE, respond
from tests.serve.clients import OpenListener, connect, is_closed, serves
from tests.serve.conftest import SECONDS


def test_half_a_request_holds_nobody_up(open_listener: OpenListener) -> None:
    """At the limit the oldest connection is closed for a new one, and other clients are
    answered.
    """
    port = open_listener(limit=16)
    with ExitStack() as stack:
        halves = [stack.enter_context(connect(port)) for _ in range(16)]
        for half in halves:
            half.sendall(b"GET / HTTP/1.1\r\nHost:")
        assert serves(port)
        assert is_closed(halves[0])
        assert serves(port)


def test_half_a_request_is_ended_at_the_timeout(open_listener: OpenListener) -> None:
    """Sending a byte now and then does not extend the timeout."""
    port = open_listener(timeout=1.0)
    with connect(port) as client:
        try:
            for byte in b"GET / HTTP/1.1\r\n" * 100:
                client.sendall(bytes((byte,)))
                time.sleep(0.02)
        except OSError:
            pass
        else:
            pytest.fail("it could drip for ten times its timeout")
    assert serves(port)


def test_silence_is_ended_at_the_timeout(open_listener: OpenListener) -> None:
    """A connection without a request is closed."""
    port = open_listener(timeout=0.1)
    with connect(port) as client:
        assert is_closed(client)


def test_slow_page_holds_up_no_other_port(open_listener: OpenListener) -> None:
    """Probes are answered while a slow page is being made."""
    slow, quick = open_listener(threads=1), open_listener()
    with connect(slow) as client:
        client.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        try:
            assert serves(quick)
        finally:
            RELEASE.set()
        assert client.makefile("rb").read().endswith(b"/slow")


def test_listener_accepts_again_after_an_error(
    server_thread: ServerThread, open_listener: OpenListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a free file descriptor the listener waits and tries again."""
    loop, errors = server_thread.loop, [OSError(errno.EMFILE, "Too many open files")]
    accept = loop.sock_accept

    async def accept_after_errors(listening: socket.socket) -> Any:
        if errors:
            raise errors.pop()
        return await accept(listening)

    monkeypatch.setattr(listener, "ACCEPT_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(loop, "sock_accept", accept_after_errors)
    assert serves(open_listener())
    assert not errors


def test_clients_that_keep_coming_do_not_hold_the_thread(
    server_thread: ServerThread, open_listener: OpenListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client's task begins before the next client is accepted, also with a full backlog."""
    begun: list[int] = []
    accepted: list[int] = []

    async def accept_at_once(listening: socket.socket) -> Any:
        if len(accepted) == 5:
            await asyncio.sleep(SECONDS)
        accepted.append(len(begun))
        return listening, None

    async def begin(self: Listener, client: socket.socket) -> None:
        begun.append(len(accepted))

    monkeypatch.setattr(server_thread.loop, "sock_accept", accept_at_once)
    monkeypatch.setattr(Listener, "serve_client", begin)
    open_listener()
    wait_until("the server", lambda: len(begun) == 5)
    assert accepted == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("turns", range(6))
def test_closing_listener_ends_every_connection(server_thread: ServerThread, turns: int) -> None:
    """A client that connects at that moment is ended or refused."""
    opened = Listener(respond, Connections(4))

    async def connect_while_closing() -> socket.socket:
        await opened.open(listen("127.0.0.1", 0))
        client = connect(opened.address[1])
        for _ in range(turns):
            await asyncio.sleep(0)
        await opened.close()
        return client

    gc.disable()  # which would close a socket that nothing refers to
    try:
        with server_thread.run(connect_while_closing()) as client:
            assert is_closed(client)
    finally:
        gc.enable()


def test_stop_ends_connections() -> None:
    """When the thread is stopped, every connection ends; it can be stopped twice, or without a
    start.
    """
    ServerThread().stop()
    server_thread = ServerThread()
    server_thread.start()
    opened = Listener(respond, Connections(4))
    server_thread.run(opened.open(listen("127.0.0.1", 0)))
    with connect(opened.address[1]) as client:
        client.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(4096).endswith(b"/x")
        server_thread.stop()
        server_thread.stop()
        assert is_closed(client)
    assert not server_thread.alive
