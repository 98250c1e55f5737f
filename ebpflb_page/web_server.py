# SPDX-License-Identifier: Apache-2.0
"""The process of `ebpflb ui`: a socket, uvicorn, and a limit for connections that last too long.

uvicorn has no time limit for a client that sends its request slowly, or not at all, and none for a
client that does not read the rest of a response.
"""

import asyncio
import hmac
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ebpflb import redaction
from ebpflb.errors import NodeError, in_words
from ebpflb.tools import pins
from ebpflb_page.answering import as_json
from ebpflb_page.application import Api, application
from ebpflb_page.rate_meter import RateMeter
from ebpflb_page.readings import Readings

# The guard: which requests are refused, and the headers of every response.
#
# Requests whose header Host is not one of our names are refused, against DNS rebinding. Requests
# from another site's page are recognized by Origin or Sec-Fetch-Site. A client that takes no data
# holds a connection for SEND_SECONDS at most.


API = "/api/"
SEND_SECONDS = 15.0
_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})
# Of our own page, or typed by the user.
_OUR_SITE = frozenset({b"same-origin", b"none"})
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self';"
    " base-uri 'none'; form-action 'self'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_ENCODED = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class Guard:
    """Refuses requests before an application gets them. An empty ``token`` means none is needed."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str] = (), token: str = "") -> None:
        self._app, self._token = app, token.encode()
        self._hosts = _LOOPBACK_NAMES | {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = self._refused(scope)
        await (refused or self._app)(scope, receive, guarded(send))

    def _refused(self, scope: Scope) -> Response | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if scope["method"] not in ("GET", "HEAD"):
            return _no(405, "only GET is allowed: this page changes nothing")
        host = headers.get(b"host", b"").decode("latin-1")
        if [name for name, _ in scope["headers"]].count(b"host") != 1 or not self._is_ours(
            host, scope
        ):
            return _no(421, "this name is not served: see `ebpflb ui --allow-host`")
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
            return _no(403, "other sites may not read this page")
        if not scope["path"].startswith(API):
            return None
        if headers.get(b"sec-fetch-site", b"none") not in _OUR_SITE:
            return _no(403, "other sites may not read this page")
        if self._token and not self._knows(headers.get(b"authorization", b"")):
            return _no(401, "the token of --token-file is missing or wrong")
        return None

    def _is_ours(self, host: str, scope: Scope) -> bool:
        """Whether this is a name of this machine, or the address that the client has
        connected to.
        """
        name = host_name(host)
        if name in self._hosts:
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or str(address) == str((scope.get("server") or ("",))[0])

    def _knows(self, authorization: bytes) -> bool:
        kind, _, token = authorization.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)


def host_name(host: str) -> str:
    """Return the name or address in the header Host, without port and brackets; "" if it is
    invalid.
    """
    if host.startswith("["):
        name, closed, port = host[1:].partition("]")
        return name.lower() if closed and (not port or port[1:].isdecimal()) else ""
    name, colon, port = host.partition(":")
    return name.rstrip(".").lower() if not colon or port.isdecimal() else ""


def _no(status: int, text: str) -> Response:
    found = as_json({"error": text}, status)
    if status == 401:
        found.headers["www-authenticate"] = "Bearer"
    return found


def guarded(send: Send) -> Send:
    """Return a ``send`` that adds the headers, and raises TimeoutError if the client takes
    no data.
    """

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            given: list[Any] = [it for it in message["headers"] if it[0].decode() not in HEADERS]
            message = {**message, "headers": given + _ENCODED}
        await asyncio.wait_for(send(message), SEND_SECONDS)

    return sending


MOST_CONNECTIONS = 64
IDLE_SECONDS = 15.0  # without a whole request, or while closing
_HEAD_BYTES = 16_384
_STOP_SECONDS = 2


@dataclass(frozen=True)
class Listen:
    """Where to listen. ``hosts`` are accepted names besides this machine's; ``token`` may
    be empty.
    """

    address: str
    port: int
    hosts: tuple[str, ...] = ()
    token: str = ""


class Reaper:
    """Aborts connections that were idle for longer than ``seconds``."""

    def __init__(self, connections: Callable[[], set[Any]], seconds: float = IDLE_SECONDS) -> None:
        self._connections, self._seconds = connections, seconds
        self._idle: dict[Any, float] = {}

    async def run(self) -> None:
        while True:
            self.look(asyncio.get_running_loop().time())
            await asyncio.sleep(self._seconds / 10)

    def look(self, now: float) -> None:
        idle = {it for it in self._connections() if _is_idle(it)}
        self._idle = {it: self._idle.get(it, now) for it in idle}
        for each, since in self._idle.items():
            if now - since >= self._seconds:
                each.transport.abort()


def _is_idle(connection: Any) -> bool:
    """Whether the connection answers no request, or is closing while its client takes no data."""
    cycle = connection.cycle
    return cycle is None or cycle.response_complete or connection.transport.is_closing()


def serve(readings: Readings, state_dir: Path, listen: Listen, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Raises NodeError if the address cannot be listened on."""
    redaction.remember(listen.token)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(redaction.Formatter("%(levelname)s %(name)s: %(message)s"))
    api = Api(readings, RateMeter(lambda: pins.pinned_maps(state_dir)))
    opened = listening(listen)
    host = f"[{listen.address}]" if ":" in listen.address else listen.address
    say(f"http://{host}:{opened.getsockname()[1]}/")
    try:
        asyncio.run(server(api, listen).serve([opened]))
    except KeyboardInterrupt:  # uvicorn raises it again when it has ended
        pass
    finally:
        opened.close()


def server(api: Api, listen: Listen) -> uvicorn.Server:
    """Return a server that is not started yet."""
    inner = application(api)
    made: list[uvicorn.Server] = []

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        reaper = Reaper(lambda: made[0].server_state.connections)
        tasks = [asyncio.create_task(reaper.run()), asyncio.create_task(api.measure())]
        yield
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    inner.router.lifespan_context = lifespan
    config = uvicorn.Config(
        Guard(inner, listen.hosts, listen.token),
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=int(IDLE_SECONDS),
        timeout_graceful_shutdown=_STOP_SECONDS,
        h11_max_incomplete_event_size=_HEAD_BYTES,
    )
    made.append(uvicorn.Server(config))
    return made[0]


def listening(listen: Listen) -> socket.socket:
    """Return a listening socket. Raises NodeError."""
    family = socket.AF_INET6 if ":" in listen.address else socket.AF_INET
    opened = socket.socket(family)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((listen.address, listen.port))
        opened.listen(MOST_CONNECTIONS)
    except OSError as error:
        opened.close()
        where = f"{listen.address}:{listen.port}"
        raise NodeError(f"--listen {where}: {in_words(error)}") from error
    return opened
