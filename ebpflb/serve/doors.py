# SPDX-License-Identifier: Apache-2.0
"""Where all our HTTP clients come in: one thread, however many ports and clients there are.

Nothing that a client does can hold anything for long: from the first byte awaited to the last one
taken an exchange has PATIENCE seconds, a head is small, and when a room is full the connection
that has asked for nothing for longest makes place for the new one.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from socket import SO_LINGER, SOL_SOCKET, socket
from struct import pack
from typing import Any, TypeVar

from ebpflb.serve.http import Answer, Exchange, Request, Respond

log = logging.getLogger(__name__)

PATIENCE = 30.0  # seconds
MOST_HEAD = 16384  # bytes of a line, and of a whole head
MOST_UNREAD = 16  # times as much is taken of what we did not ask for

_AT_ONCE = pack("ii", 1, 0)  # struct linger: no time at all

_Result = TypeVar("_Result")


class Loop:
    """The thread; everything about sockets happens in it."""

    def __init__(self) -> None:
        self._stopped = asyncio.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="serve", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._begun.wait()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def do(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Has the thread do it; returns or raises what comes of it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        """Ends all that goes on; harmless if it was never started."""
        if self.alive:
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._loop.set_default_executor(ThreadPoolExecutor(1, "pages"))
            self._begun.set()
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self._stopped.wait()


class Room:
    """The connections of one or more doors, at most so many at a time."""

    def __init__(self, most: int, patience: float = PATIENCE) -> None:
        self.most, self.patience = most, patience
        self._inside: dict[asyncio.StreamWriter, None] = {}  # who asked last is last

    def enter(self, writer: asyncio.StreamWriter) -> None:
        while len(self._inside) >= self.most:
            self.throw_out(next(iter(self._inside)))
        self._inside[writer] = None

    def asks(self, writer: asyncio.StreamWriter) -> None:
        """A request has come whole, be it of one who is thrown out by now."""
        if writer in self._inside:
            self._inside[writer] = self._inside.pop(writer)

    def leave(self, writer: asyncio.StreamWriter) -> None:
        self._inside.pop(writer, None)
        writer.transport.abort()

    def throw_out(self, writer: asyncio.StreamWriter) -> None:
        """What it was to be told is forgotten, by the kernel too."""
        if not writer.transport.is_closing():
            writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, _AT_ONCE)
        self.leave(writer)


class Door:
    """One listening socket, and those who came in by it.

    With ``slow`` the answers are made in a thread of their own, one after the other.
    """

    def __init__(self, respond: Respond, room: Room, *, slow: bool = False) -> None:
        self._respond, self._room, self._slow = respond, room, slow
        self._guests: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._closed = False

    async def open(self, listening: socket) -> None:
        """The socket is ours from now on."""
        self._server = await asyncio.start_server(self._serve, sock=listening, limit=MOST_HEAD)

    @property
    def name(self) -> tuple[str, int]:
        """The address and port, once it is open."""
        assert self._server
        address: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return address

    async def close(self) -> None:
        """Connections are refused when this returns, and those that are open are ended."""
        self._closed = True
        if self._server:
            await _close(self._server)
        for writer in [*self._guests]:
            self._room.leave(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:
            writer.transport.abort()
            return
        self._room.enter(writer)
        self._guests.add(writer)
        writer.transport.set_write_buffer_limits(0)  # drain() waits until all is taken
        try:
            while await self._exchange(reader, writer):
                pass
        except OSError:  # gone, or too slow
            self._room.throw_out(writer)
        finally:
            self._guests.discard(writer)
            self._room.leave(writer)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether there may be another one."""
        async with asyncio.timeout(self._room.patience):
            head = await _head(reader)
            if head is None:
                return False
            self._room.asks(writer)
            exchange = Exchange(head)
            if exchange.request:
                exchange.give(await self._answer(exchange.request))
            writer.write(exchange.said)
            await writer.drain()
            if not exchange.close_connection:
                return True
            writer.write_eof()
            for _ in range(MOST_UNREAD):  # closed with bytes unread it would break off
                if not await reader.read(MOST_HEAD):
                    break
        return False

    async def _answer(self, request: Request) -> Answer:
        try:
            if self._slow:
                return await asyncio.get_running_loop().run_in_executor(
                    None, self._respond, request
                )
            return self._respond(request)
        except Exception:
            log.exception("%s: unexpected", request.path)
            return Answer(500, b"internal error\n")


async def _close(server: asyncio.Server) -> None:
    """Python 3.11 forgets, open, whom it has accepted but not met when its server is closed
    (cpython issue 109564): so first it accepts nobody and meets them.
    """
    for listening in server.sockets:
        asyncio.get_running_loop().remove_reader(listening.fileno())
    await asyncio.sleep(0)
    server.close()


async def _head(reader: asyncio.StreamReader) -> bytes | None:
    """All up to the blank line; None if that never comes. One that is too long is cut short."""
    head = b""
    with suppress(ValueError):  # a line that is longer than the reader's limit
        while len(head) < MOST_HEAD:
            line = await reader.readline()
            head += line
            if line in (b"\r\n", b"\n"):
                return head
            if not line.endswith(b"\n"):
                return None
    return b""
