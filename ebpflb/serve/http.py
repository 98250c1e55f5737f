# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 without sockets: what is asked, what is answered, and how both look in bytes.

http.server does the reading and the writing; ``doors`` has the connections.
"""

from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from typing import NamedTuple

TEXT, JSON = "text/plain; charset=utf-8", "application/json"


class Request(NamedTuple):
    """What we look at of one: ``path`` is without the query; the method never matters."""

    path: str
    accept: str


class Answer(NamedTuple):
    """A status, a body and its Content-Type, and further headers."""

    code: int
    body: bytes
    kind: str = TEXT
    headers: Mapping[str, str] = {}


Respond = Callable[[Request], Answer]

NOT_FOUND = Answer(404, b"404 page not found\n")


class Exchange(BaseHTTPRequestHandler):
    """One head, and all that is said to it."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "ebpflb", ""
    default_request_version = "HTTP/1.1"
    command = ""

    def __init__(self, head: bytes) -> None:
        self.rfile = BytesIO(head)
        self.wfile = self._said = BytesIO()
        self.raw_requestline = self.rfile.readline()
        self.requestline, self.request_version = "", self.protocol_version
        self.close_connection = True
        self.request: Request | None = None  # none: what to say to that is said already
        if not head:
            self.send_error(431)
        elif self.parse_request():
            self.close_connection |= self._has_body() or self.request_version != "HTTP/1.1"
            self.request = Request(self.path.partition("?")[0], self.headers.get("Accept", ""))

    @property
    def said(self) -> bytes:
        return self._said.getvalue()

    def give(self, answer: Answer) -> None:
        self.send_response_only(answer.code)
        headers = {
            "Content-Type": answer.kind,
            "X-Content-Type-Options": "nosniff",
            "Content-Length": str(len(answer.body)),
            "Date": self.date_time_string(),
            **answer.headers,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def handle_expect_100(self) -> bool:
        return True

    def log_message(self, *_: object) -> None:
        """There is no access log."""

    def _has_body(self) -> bool:
        return "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0"
