# SPDX-License-Identifier: Apache-2.0
"""Whatever a client does, the server stays and others are answered."""

import asyncio
import gc
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.serve.doors import Door, Loop, Room
from ebpflb.serve.http import Answer, Request
from ebpflb.serve.ports import listening
from tests.serve.conftest import SECONDS, ask

RELEASE = threading.Event()  # lets /slow come to an end
BIG = 8 << 20  # more than the kernel's buffers take

Open = Callable[..., int]


def respond(request: Request) -> Answer:
    if request.path == "/big":
        return Answer(200, b"x" * BIG)
    if request.path == "/slow":
        RELEASE.wait()
    return Answer(200, request.path.encode())


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    loop.start()
    yield loop
    loop.stop()


@pytest.fixture(scope="module")
def serve(loop: Loop) -> Iterator[Open]:
    """Opens a door for at most so many at a time, each with so much patience; gives its port."""
    doors: list[Door] = []

    def serve(most: int = 16, patience: float = 30.0, *, slow: bool = False) -> int:
        doors.append(Door(respond, Room(most, patience), slow=slow))
        loop.do(doors[-1].open(listening("127.0.0.1", 0)))
        return doors[-1].name[1]

    yield serve

    async def close() -> None:
        for door in doors:
            await door.close()

    loop.do(close())


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
    client.sendall(b"GET /kept HTTP/1.1\r\n\r\n")
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


def test_half_a_request_holds_nobody_up(serve: Open) -> None:
    """As many as there is room for, and more: the oldest makes place, and others are answered."""
    port = serve(most=16)
    with ExitStack() as stack:
        halves = [stack.enter_context(connect(port)) for _ in range(16)]
        for half in halves:
            half.sendall(b"GET / HTTP/1.1\r\nHost:")
        assert is_well(port)
        assert ended(halves[0])
        assert is_well(port)


def test_who_goes_on_asking_stays(serve: Open) -> None:
    """A prober that keeps its connection is not sent away for having come first."""
    port = serve(most=2)
    with connect(port) as prober, connect(port) as silent:
        asks(silent)
        for _ in range(2):
            asks(prober)
            assert is_well(port)
        assert ended(silent)


def test_half_a_request_is_ended_when_patience_is(serve: Open) -> None:
    """However it drips: a byte now and then buys no time."""
    port = serve(patience=0.2)
    with connect(port) as client:
        try:
            for byte in b"GET / HTTP/1.1\r\n" * 100:
                client.sendall(bytes((byte,)))
                time.sleep(0.02)
        except OSError:
            pass
        else:
            pytest.fail("it could drip for ten times its patience")
    assert is_well(port)


def test_silence_is_ended_when_patience_is(serve: Open) -> None:
    """A connection that says nothing is not kept."""
    port = serve(patience=0.1)
    with connect(port) as client:
        assert ended(client)


@pytest.mark.parametrize("slow", [False, True])
def test_client_that_never_reads_is_ended_when_patience_is(serve: Open, slow: bool) -> None:
    """What it does not take is not kept for it; others read all of theirs meanwhile."""
    port = serve(patience=1.0, slow=slow)
    with connect(port) as client:
        client.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        assert is_well(port)
        assert len(ask("/big", port).body) == BIG
        poll = select.poll()
        poll.register(client, select.POLLRDHUP)
        assert poll.poll(SECONDS * 1000), "it is still kept"


def test_clients_that_never_read_do_not_fill_the_room(serve: Open) -> None:
    """The same by number instead of time."""
    port = serve(most=4)
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(connect(port)).sendall(b"GET /big HTTP/1.1\r\n\r\n")
        assert is_well(port)


def test_thousand_quick_connections(serve: Open) -> None:
    """Some are answered, some go before; nothing of them is left."""
    port = serve(most=16)
    before, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for number in range(1000):
        with connect(port) as client:
            if number % 3:
                client.sendall(b"GET / HTTP/1.1\r\n\r\n"[: number % 30])
        assert number % 100 or is_well(port)
    assert threading.active_count() == before
    end = time.monotonic() + SECONDS
    while len(os.listdir("/proc/self/fd")) > files:
        assert time.monotonic() < end, "connections are left open"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"garbage\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"GET / HTTP/x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10000 + b"\r\n", 431),
        (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
    ],
)
def test_garbage_is_refused(serve: Open, request_: bytes, status: int) -> None:
    """With the status that says why."""
    assert said(serve(), request_).split()[:2] == [b"HTTP/1.1", str(status).encode()]


@pytest.fixture(scope="module")
def port(serve: Open) -> int:
    """One door for all examples."""
    return serve()


@given(some.binary(max_size=200))
def test_any_bytes(port: int, anything: bytes) -> None:
    """Nothing that comes in breaks the server."""
    said(port, anything)
    said(port, b"GET /" + anything + b" HTTP/1.1\r\n" + anything + b"\r\n\r\n")
    assert is_well(port)


def test_half_a_request_is_not_answered(serve: Open) -> None:
    """Whoever ends in the middle of a head has asked nothing."""
    assert said(serve(), b"GET / HTTP/1.1\r\nHost: x\r\n") == b""
    assert said(serve(), b"\r\n\r\n") == b""


def test_head_without_carriage_returns(serve: Open) -> None:
    """As people type it."""
    assert said(serve(), b"GET /x HTTP/1.0\n\n").endswith(b"\r\n\r\n/x")


def test_connection_is_kept(serve: Open) -> None:
    """HTTP/1.1: request after request, also all at once."""
    answers = said(serve(), b"GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\n")
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert b"\r\n\r\n/aHTTP/1.1" in answers
    assert answers.endswith(b"\r\n\r\n/b")


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /x HTTP/1.0\r\n\r\n",
        b"GET /x HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"POST /x HTTP/1.1\r\nContent-Length: 100\r\n\r\nsome of it",
        b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"POST /x HTTP/1.1\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n",
    ],
)
def test_connection_is_ended_after_the_answer(serve: Open, request_: bytes) -> None:
    """Where the client wants it, and after a body: nobody reads that."""
    with connect(serve()) as client:
        client.sendall(request_)
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nConnection: close\r\n" in answer
    assert answer.endswith(b"\r\n\r\n/x")


def test_answer_survives_a_body_that_nobody_reads(serve: Open) -> None:
    """The client gets its answer although it still sends, and can send on for a while."""
    with connect(serve()) as client:
        client.sendall(b"POST /x HTTP/1.1\r\nContent-Length: 200000\r\n\r\n" + b"x" * 50000)
        assert client.makefile("rb").read().endswith(b"\r\n\r\n/x")
        for _ in range(3):
            client.sendall(b"x" * 50000)


def test_slow_page_holds_up_no_other_port(serve: Open) -> None:
    """Probes are answered while a page is made, which takes a while."""
    slow, quick = serve(slow=True), serve()
    with connect(slow) as client:
        client.sendall(b"GET /slow HTTP/1.1\r\nConnection: close\r\n\r\n")
        try:
            assert is_well(quick)
        finally:
            RELEASE.set()
        assert client.makefile("rb").read().endswith(b"/slow")


@pytest.mark.parametrize("turns", range(6))
def test_closing_door_forgets_nobody(loop: Loop, turns: int) -> None:
    """Who comes in as it closes is ended or refused, however far the loop has got with it."""
    door = Door(respond, Room(4))

    async def come_in() -> socket.socket:
        await door.open(listening("127.0.0.1", 0))
        client = connect(door.name[1])
        for _ in range(turns):
            await asyncio.sleep(0)
        await door.close()
        return client

    gc.disable()  # which would end those that nobody knows
    try:
        with loop.do(come_in()) as client:
            assert ended(client)
    finally:
        gc.enable()


def test_stop_ends_connections() -> None:
    """A loop that stops takes everything along, and can be asked to stop twice or never."""
    Loop().stop()
    loop = Loop()
    loop.start()
    door = Door(respond, Room(4))
    loop.do(door.open(listening("127.0.0.1", 0)))
    with connect(door.name[1]) as client:
        client.sendall(b"GET /x HTTP/1.1\r\n\r\n")
        assert client.recv(4096).endswith(b"/x")
        loop.stop()
        loop.stop()
        assert ended(client)
    assert not loop.alive
