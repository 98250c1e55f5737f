# SPDX-License-Identifier: Apache-2.0
"""Which requests are answered at all, and what every response has.

A name that somebody else's DNS gives this address (DNS rebinding) is no name of ours, so the header
Host tells such a request. A request that another site's page makes says so in Origin or
Sec-Fetch-Site. A client that takes no data holds a connection for SEND_SECONDS.
"""

import asyncio
import hmac
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ebpflb_page.answering import as_json

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
    """Around an application. ``token`` is empty where none is asked for."""

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
        """A name of this machine, or the address that the client has connected to."""
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
    """Of the header Host: a name or an address, without port and brackets; "" if it is neither."""
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
    """Adds the headers; raises TimeoutError where the client takes no data."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            given: list[Any] = [it for it in message["headers"] if it[0].decode() not in HEADERS]
            message = {**message, "headers": given + _ENCODED}
        await asyncio.wait_for(send(message), SEND_SECONDS)

    return sending
