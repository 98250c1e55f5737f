# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1: requests and responses as values; h11 reads and writes their bytes.

h11 costs the agent 0.3 MB and leaves sockets, timeouts and limits to ``listener``. No complete
server that was measured (tornado, aiohttp, cheroot, http.server) keeps those limits with hundreds
of listening sockets in one thread.
"""

from asyncio import StreamReader
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

import h11

TEXT, JSON = "text/plain; charset=utf-8", "application/json"

MAX_HEAD_BYTES = 16384
MAX_HEAD_FIELDS = 100


class Request(NamedTuple):
    """``path`` is without the query, ``accept`` the Accept header; ``on_loopback``: the client asks
    from a loopback address. No handler needs the method.
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
        """The next request, or the response that refuses it; None if the client ends before.

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
        if event.method == b"CONNECT":  # h11 sends no body after a 2xx to it
            return _refusal(405)
        if len(event.headers) > MAX_HEAD_FIELDS:
            return _refusal(431)
        path, _, query = event.target.decode("latin-1").partition("?")
        if path.startswith("//"):  # as joined to a base URL that ends in a slash
            path = "/" + path.lstrip("/")
        accept = next((value for name, value in event.headers if name == b"accept"), b"")
        return Request(path, accept.decode("latin-1"), query)

    def send(self, response: Response) -> bytes:
        """The response as bytes. It closes the connection if the request has a body."""
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
        """Whether the connection stays for another request, once a response has been sent."""
        keep_alive = self._connection.our_state is self._connection.their_state is h11.DONE
        if keep_alive:
            self._connection.start_next_cycle()
        return keep_alive


def _refusal(status: int) -> Response:
    body = f"{status} {HTTPStatus(status).phrase}\n".encode()
    return Response(status, body, headers={"Connection": "close"})
