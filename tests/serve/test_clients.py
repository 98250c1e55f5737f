# SPDX-License-Identifier: Apache-2.0
"""Whatever a client does, the server stays and others are answered."""

import asyncio
import gc
import os
import select
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from ebpflb.serve.doors import Door, Loop, Room
from ebpflb.serve.ports import listening
from tests.serve.answers import BIG, RELEASE, respond
from tests.serve.clients import Open, asks, connect, ended, is_well
from tests.serve.conftest import SECONDS, ask


def test_half_a_request_holds_nobody_up(open_door: Open) -> None:
    """As many as there is room for, and more: the oldest makes place, and others are answered."""
    port = open_door(most=16)
    with ExitStack() as stack:
        halves = [stack.enter_context(connect(port)) for _ in range(16)]
        for half in halves:
            half.sendall(b"GET / HTTP/1.1\r\nHost:")
        assert is_well(port)
        assert ended(halves[0])
        assert is_well(port)


def test_who_goes_on_asking_stays(open_door: Open) -> None:
    """A prober that keeps its connection is not sent away for having come first."""
    port = open_door(most=2)
    with connect(port) as prober, connect(port) as silent:
        asks(silent)
        for _ in range(2):
            asks(prober)
            assert is_well(port)
        assert ended(silent)


def test_half_a_request_is_ended_when_patience_is(open_door: Open) -> None:
    """However it drips: a byte now and then buys no time."""
    port = open_door(patience=0.2)
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


def test_silence_is_ended_when_patience_is(open_door: Open) -> None:
    """A connection that says nothing is not kept."""
    port = open_door(patience=0.1)
    with connect(port) as client:
        assert ended(client)


@pytest.mark.parametrize("slow", [False, True])
def test_client_that_never_reads_is_ended_when_patience_is(open_door: Open, slow: bool) -> None:
    """What it does not take is not kept for it; others read all of theirs meanwhile."""
    port = open_door(patience=3.0, slow=slow)
    with connect(port) as client:
        client.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        assert is_well(port)
        assert len(ask("/big", port).body) == BIG
        poll = select.poll()
        poll.register(client, select.POLLRDHUP)
        assert poll.poll(SECONDS * 1000), "it is still kept"


def test_clients_that_never_read_do_not_fill_the_room(open_door: Open) -> None:
    """The same by number instead of time."""
    port = open_door(most=4)
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(connect(port)).sendall(b"GET /big HTTP/1.1\r\n\r\n")
        assert is_well(port)


def test_thousand_quick_connections(open_door: Open) -> None:
    """Some are answered, some go before; nothing of them is left."""
    port = open_door(most=16)
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


def test_slow_page_holds_up_no_other_port(open_door: Open) -> None:
    """Probes are answered while a page is made, which takes a while."""
    slow, quick = open_door(slow=True), open_door()
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
