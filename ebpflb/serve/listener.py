# SPDX-License-Identifier: Apache-2.0
"""Where HTTP clients connect: one thread, however many listening sockets and clients there are.

No client can hold anything for long. From the first byte awaited to the last one delivered an
exchange has TIMEOUT_SECONDS, a head is small, and at the connection limit the connection whose last
request is the oldest is closed for a new one.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from ipaddress import ip_address
from socket import SO_LINGER, SOL_SOCKET, socket
from struct import pack
from typing import Any, TypeVar

from ebpflb.serve.http import Handler, HttpConnection, Request, Response

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 30.0
ACCEPT_RETRY_SECONDS = 1.0
READ_BYTES = 1 << 14
MAX_UNREAD_BYTES = 1 << 18

_NO_LINGER = pack("ii", 1, 0)  # struct linger: close(2) resets the connection

_Result = TypeVar("_Result")


class ServerThread:
    """The thread of all listeners and connections, with its event loop."""

    def __init__(self) -> None:
        self._stopped = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._thread = threading.Thread(target=self._run, name="serve", daemon=True)

    def start(self) -> None:
        self._loop = self._runner.get_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(1, "pages"))
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs it in the thread; returns its result or raises its error."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        """Closes all connections. Harmless if it was never started."""
        if self.alive:
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._stopped.wait())


def run_beside(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """A task of the running event loop; one that fails ends the agent, as a thread that fails."""
    task = asyncio.create_task(work)
    task.add_done_callback(_report_failure)
    return task


def _report_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()):
        failed = type(error), error, error.__traceback__, threading.current_thread()
        threading.excepthook(threading.ExceptHookArgs(failed))


class Connections:
    """The open connections of one or more listeners, at most ``limit`` at a time.

    An exchange on one of them that lasts longer than ``timeout`` seconds resets it.
    """

    def __init__(self, limit: int, timeout: float = _TIMEOUT_SECONDS) -> None:
        self.limit, self.timeout = limit, timeout
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest last request comes first

    @contextmanager
    def including(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Closed at the end, or reset by an OSError. At the limit the first one is reset for it."""
        while len(self._open) >= self.limit:
            self._reset(next(iter(self._open)))
        self._open[writer] = None
        try:
            yield
        except OSError:
            self._reset(writer)
            raise
        finally:
            self._close(writer)

    def requested(self, writer: asyncio.StreamWriter) -> None:
        """A whole request has arrived, perhaps on a connection that has been reset since."""
        if writer in self._open:
            self._open[writer] = self._open.pop(writer)

    def _close(self, writer: asyncio.StreamWriter) -> None:
        self._open.pop(writer, None)
        writer.transport.abort()

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        """Closes it; the kernel too discards what the client has not taken."""
        if not writer.transport.is_closing():
            writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, _NO_LINGER)
        self._close(writer)


class Listener:
    """One listening socket and the connections that it accepts.

    ``slow`` handlers run in threads: those of an executor, or for True one that all share, one
    request after the other. ``quick``: handlers by their path, which never wait for a slow one.
    """

    def __init__(
        self,
        handler: Handler,
        connections: Connections,
        *,
        slow: bool | Executor = False,
        quick: Mapping[str, Handler] = {},
    ) -> None:
        self._handler, self._connections, self._slow = handler, connections, slow
        self._quick = quick
        self._accepting: asyncio.Task[None] | None = None

    async def open(self, listening: socket) -> None:
        """Takes the socket over: ``close`` closes it."""
        listening.setblocking(False)
        self._socket = listening
        found: Any = listening.getsockname()
        self.address: tuple[str, int] = (found, 0) if isinstance(found, str) else found[:2]
        self._name = f"port {self.address[1]}" if self.address[1] else found
        self._accepting = run_beside(self._accept())

    async def close(self) -> None:
        """Closes the socket and its connections; new ones are refused when this returns."""
        if self._accepting:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._socket.close()

    async def _accept(self) -> None:
        """Until cancelled: then all connections are too.

        A socket that was accepted but whose task has not begun is closed when Python frees it.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    client, _ = await loop.sock_accept(self._socket)
                    tasks.create_task(self._serve(client))
                    await asyncio.sleep(0)  # sock_accept does not wait while clients do
                except ConnectionAbortedError:  # the client has gone again
                    continue
                except OSError as error:  # too many open files
                    log.warning("%s: %s", self._name, error)
                    await asyncio.sleep(ACCEPT_RETRY_SECONDS)

    async def _serve(self, client: socket) -> None:
        """Raises nothing: that would end all tasks of the group."""
        try:
            reader, writer = await asyncio.open_connection(sock=client, limit=READ_BYTES)
            writer.transport.set_write_buffer_limits(0)  # drain() waits until the kernel has it all
            with self._connections.including(writer):
                connection = HttpConnection()
                while await self._exchange(connection, reader, writer):
                    pass
        except OSError as error:  # the client has closed the connection, or the time is over
            log.debug("%s: %s", self._name, error)
        except Exception:
            log.exception("%s: unexpected", self._name)

    async def _exchange(
        self, connection: HttpConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """One request and its response; whether another one may follow."""
        async with asyncio.timeout(self._connections.timeout):
            if not (request := await connection.read_request(reader)):
                return False
            if isinstance(request, Request):
                request = request._replace(on_loopback=_is_on_loopback(writer))
            self._connections.requested(writer)
            writer.write(connection.send(await self._respond(request)))
            await writer.drain()
            if connection.next_cycle():
                return True
            writer.write_eof()
            unread = MAX_UNREAD_BYTES  # closed with more, the connection is reset (RFC 9112 9.6)
            while unread > 0 and (data := await reader.read(READ_BYTES)):
                unread -= len(data)
        return False

    async def _respond(self, request: Request | Response) -> Response:
        if isinstance(request, Response):  # which refuses the request
            return request
        try:
            if quick := self._quick.get(request.path):
                return quick(request)
            if self._slow:
                loop = asyncio.get_running_loop()
                threads = None if self._slow is True else self._slow
                return await loop.run_in_executor(threads, self._handler, request)
            return self._handler(request)
        except Exception:
            log.exception("%s: unexpected", request.path)
            return Response(500, b"internal error\n")


def _is_on_loopback(writer: asyncio.StreamWriter) -> bool:
    """No packet from another machine has such a source: the kernel drops it."""
    peer: Any = writer.get_extra_info("peername")
    if not isinstance(peer, tuple):  # of a Unix socket
        return False
    address = ip_address(peer[0].partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
