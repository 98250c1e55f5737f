# SPDX-License-Identifier: Apache-2.0
"""The listening side of HTTP: one thread for all listening sockets and clients.

No client can hold anything for long. An exchange has TIMEOUT_SECONDS from the first awaited byte to
the last delivered one, and a head is small. At the connection limit, the connection with the oldest
last request is closed for a new one.
"""

import asyncio
import errno
import logging
import os
import socket
import threading
from asyncio import StreamReader
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import formatdate
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, NamedTuple, TypeVar

import h11

from ebpflb.errors import NodeError, in_words
from ebpflb.model.addresses import Family
from ebpflb.stopping import parts

# HTTP/1.1: requests and responses as values; h11 reads and writes their bytes.
#
# h11 costs the agent 0.3 MB and leaves sockets, timeouts and limits to the code below. None of the
# complete servers that were measured (tornado, aiohttp, cheroot, http.server) keeps those limits
# with hundreds of listening sockets in one thread.

TEXT, JSON = "text/plain; charset=utf-8", "application/json"

MAX_HEAD_BYTES = 16384
MAX_HEAD_FIELDS = 100


class Request(NamedTuple):
    """A request; the method is left out because no handler needs it.

    ``path`` is without the query, ``accept`` the Accept header; ``on_loopback``: the client's
    address is a loopback address.
    """

    path: str
    accept: str
    query: str = ""
    on_loopback: bool = False


class Response(NamedTuple):
    """A status, a body and its Content-Type, and further headers."""

    status: int
    body: bytes
    content_type: str = TEXT
    headers: Mapping[str, str] = {}


Handler = Callable[[Request], Response]

NOT_FOUND = Response(404, b"404 page not found\n")


class HttpConnection:
    """The requests and responses of one connection, in turn."""

    def __init__(self) -> None:
        self._connection = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)

    async def read_request(self, reader: StreamReader) -> Request | Response | None:
        """Return the next request, or the response that refuses it; None if the client ends before.

        Empty lines before a request are ignored (RFC 9112 2.2).
        """
        connection, self._without_body = self._connection, False
        try:
            while not isinstance(event := connection.next_event(), h11.Request):
                unparsed, _ = connection.trailing_data
                if not (data := await reader.read(MAX_HEAD_BYTES + 1 - len(unparsed))):
                    return None
                if data := data if unparsed else data.lstrip(b"\r\n"):
                    connection.receive_data(data)
            self._without_body = event.method == b"HEAD"
            connection.next_event()  # the end of the request, unless it has a body
        except h11.RemoteProtocolError as error:
            return _refusal(error.error_status_hint)
        if event.http_version not in (b"1.0", b"1.1"):
            return _refusal(505)
        if event.method == b"CONNECT":  # h11 sends no body after a 2xx to CONNECT
            return _refusal(405)
        if len(event.headers) > MAX_HEAD_FIELDS:
            return _refusal(431)
        path, _, query = event.target.decode("latin-1").partition("?")
        if path.startswith("//"):  # as when joined to a base URL that ends in a slash
            path = "/" + path.lstrip("/")
        accept = next((value for name, value in event.headers if name == b"accept"), b"")
        return Request(path, accept.decode("latin-1"), query)

    def send(self, response: Response) -> bytes:
        """Return the response as bytes; it closes the connection if the request has a body."""
        headers = {
            "Content-Type": response.content_type,
            "X-Content-Type-Options": "nosniff",
            "Content-Length": str(len(response.body)),
            "Date": formatdate(usegmt=True),
            **response.headers,
        }
        if self._connection.their_state is not h11.DONE:
            headers["Connection"] = "close"
        head = h11.Response(
            status_code=response.status,
            headers=list(headers.items()),
            reason=HTTPStatus(response.status).phrase.encode(),
        )
        body = h11.Data(b"" if self._without_body else response.body)
        events = head, body, h11.EndOfMessage()
        return b"".join(self._connection.send(event) or b"" for event in events)

    def next_cycle(self) -> bool:
        """Whether the connection stays open for another request after a response."""
        keep_alive = self._connection.our_state is self._connection.their_state is h11.DONE
        if keep_alive:
            self._connection.start_next_cycle()
        return keep_alive


def _refusal(status: int) -> Response:
    body = f"{status} {HTTPStatus(status).phrase}\n".encode()
    return Response(status, body, headers={"Connection": "close"})


log = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 30.0
ACCEPT_RETRY_SECONDS = 1.0
READ_BYTES = 1 << 14
BACKLOG = 128

_Result = TypeVar("_Result")


class ServerThread:
    """The thread of all listeners and connections, with its event loop."""

    def __init__(self) -> None:
        self._stopped = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._thread = threading.Thread(target=self._run, name="serve", daemon=True)

    def start(self) -> None:
        self.loop = self._runner.get_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the thread; return its result or raise its error."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None:
        """Close all connections; does nothing if the thread was never started."""
        if self.alive:
            self.loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._stopped.wait())


def run_beside(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Start a task in the running event loop; its failure ends the agent, like that of a thread."""
    task = asyncio.create_task(work)
    task.add_done_callback(_report_failure)
    return task


def _report_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()):
        failed = type(error), error, error.__traceback__, threading.current_thread()
        threading.excepthook(threading.ExceptHookArgs(failed))


class Connections:
    """The open connections of one or more listeners, at most ``limit`` at a time.

    An exchange that lasts longer than ``timeout`` seconds ends its connection.
    """

    def __init__(self, limit: int, timeout: float = _TIMEOUT_SECONDS) -> None:
        self.limit, self.timeout = limit, timeout
        self._open: dict[asyncio.StreamWriter, None] = {}  # sorted by the time of the last request

    @contextmanager
    def including(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Include a connection, which is closed at the end; at the limit, close the first one."""
        while len(self._open) >= self.limit:
            self._close(next(iter(self._open)))
        self._open[writer] = None
        try:
            yield
        finally:
            self._close(writer)

    def requested(self, writer: asyncio.StreamWriter) -> None:
        """Note a complete request, perhaps on a connection that has been closed since."""
        if writer in self._open:
            self._open[writer] = self._open.pop(writer)

    def _close(self, writer: asyncio.StreamWriter) -> None:
        self._open.pop(writer, None)
        writer.transport.abort()


class Listener:
    """One listening socket and the connections that it accepts.

    With ``threads`` the handler runs in as many threads of its own, for pages that take time.
    """

    def __init__(self, handler: Handler, connections: Connections, *, threads: int = 0) -> None:
        self._handler, self._connections = handler, connections
        self._threads = ThreadPoolExecutor(threads, "pages") if threads else None
        self._accepting: asyncio.Task[None] | None = None

    async def open(self, listening: socket.socket) -> None:
        """Take the socket over: ``close`` closes it."""
        listening.setblocking(False)
        self._socket = listening
        found: Any = listening.getsockname()
        self.address: tuple[str, int] = (found, 0) if isinstance(found, str) else found[:2]
        self._name = f"port {self.address[1]}" if self.address[1] else found
        self._accepting = run_beside(self._accept())

    async def close(self) -> None:
        """Close the socket and its connections; new ones are refused when this returns."""
        if self._accepting:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._socket.close()
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _accept(self) -> None:
        """Accept until cancelled: then all connections are cancelled too.

        A socket that was accepted but whose task has not begun is closed when Python frees it.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    client, _ = await loop.sock_accept(self._socket)
                    tasks.create_task(self.serve_client(client))
                    await asyncio.sleep(0)  # sock_accept does not wait while clients are waiting
                except ConnectionAbortedError:  # the client is gone again
                    continue
                except OSError as error:  # too many open files
                    log.warning("%s: %s", self._name, error)
                    await asyncio.sleep(ACCEPT_RETRY_SECONDS)

    async def serve_client(self, client: socket.socket) -> None:
        """Serve a client. Raises nothing: an exception would end all tasks of the group."""
        try:
            reader, writer = await asyncio.open_connection(sock=client, limit=READ_BYTES)
            writer.transport.set_write_buffer_limits(0)  # drain() waits until the kernel has it all
            with self._connections.including(writer):
                connection = HttpConnection()
                while await self._exchange(connection, reader, writer):
                    pass
        except OSError as error:  # the client closed the connection, or the time is over
            log.debug("%s: %s", self._name, error)
        except Exception as error:
            parts.failed(self._name, error)

    async def _exchange(
        self, connection: HttpConnection, reader: StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Handle one request and its response; return whether another one may follow."""
        async with asyncio.timeout(self._connections.timeout):
            if not (request := await connection.read_request(reader)):
                return False
            if isinstance(request, Request):
                request = request._replace(on_loopback=_is_on_loopback(writer))
            self._connections.requested(writer)
            writer.write(connection.send(await self._respond(request)))
            await writer.drain()
            return connection.next_cycle()

    async def _respond(self, request: Request | Response) -> Response:
        if isinstance(request, Response):  # a refusal
            return request
        try:
            if self._threads:
                loop = asyncio.get_running_loop()
                response = await loop.run_in_executor(self._threads, self._handler, request)
            else:
                response = self._handler(request)
        except Exception as error:
            parts.failed(self._name, error)
            return Response(500, b"internal error\n")
        parts.succeeded(self._name)
        return response


def _is_on_loopback(writer: asyncio.StreamWriter) -> bool:
    """Whether the client is on loopback: the kernel drops such packets from other machines."""
    peer: Any = writer.get_extra_info("peername")
    if not isinstance(peer, tuple):  # for a Unix socket
        return False
    address = ip_address(peer[0].partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


# The addresses that the operator configures: opened at once, or as soon as they are free.

LISTEN_RETRY_SECONDS = 5.0  # kube-proxy.md 13.1


_FAMILIES = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}


def split_host_port(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; an IPv6 host is in brackets. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError.

    0.0.0.0 and :: mean both families if the node has both, as in kube-proxy.
    """
    if host in ("", "0.0.0.0", "::"):
        try:
            return _listen("::", port, socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if host == "::" or error.errno != errno.EAFNOSUPPORT:
                raise
    return listen_in_family(host, port, Family.IPV6 if ":" in host else Family.IPV4)


def listen_in_family(host: str, port: int, family: Family) -> socket.socket:
    """Return a listening socket of this family only. Raises OSError."""
    return _listen(host, port, _FAMILIES[family])


def _listen(host: str, port: int, family: int, **options: bool) -> socket.socket:
    return socket.create_server((host, port), family=family, backlog=BACKLOG, **options)


def _reason(error: Exception) -> str:
    """Return the kernel's error, without Python's words and its repetition of the address."""
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return in_words(error)


def level_of(error: Exception) -> int:
    """Return the log level: beside a kube-proxy to be replaced, taken ports are expected."""
    is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    return logging.WARNING if is_taken else logging.ERROR


class Port:
    """The port of ``address`` (HOST:PORT; empty: no port).

    If it is ``required``, a failure to listen is an error; otherwise it is tried again every
    ``retry`` seconds.
    """

    def __init__(
        self,
        name: str,
        address: str,
        listener: Listener,
        *,
        required: bool = False,
        retry: float = LISTEN_RETRY_SECONDS,
    ) -> None:
        self.name, self.address = name, address
        self._listener, self._required, self._retry = listener, required, retry
        self.error = ""  # why it is not open
        self._retrying: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open the port. Raises NodeError with address and reason if it is required and fails."""
        if self.address and not await self._try_open():
            self._retrying = run_beside(self._retry_until_open())

    async def close(self) -> None:
        if self._retrying:
            self._retrying.cancel()
        await self._listener.close()

    async def _try_open(self) -> bool:
        try:
            listening = listen(*split_host_port(self.address))
        except (OSError, ValueError, OverflowError) as error:
            self._fail(_reason(error), level_of(error))
            return False
        await self._listener.open(listening)
        self.error = ""
        log.info("%s on %s", self.name, self.address)
        return True

    async def _retry_until_open(self) -> None:
        while True:
            await asyncio.sleep(self._retry)
            if await self._try_open():
                return

    def _fail(self, reason: str, level: int) -> None:
        if self._required:
            raise NodeError(f"{self.name} cannot listen on {self.address}: {reason}")
        if reason != self.error:
            log.log(
                level,
                "%s on %s: %s; trying again every %g s",
                self.name,
                self.address,
                reason,
                self._retry,
            )
        self.error = reason
