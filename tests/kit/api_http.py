# SPDX-License-Identifier: Apache-2.0
"""The fake API server's HTTP: whole answers, and streams of chunks that can break off."""

import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.kit.api_discovery import OBJECT_PATHS, document
from tests.kit.api_history import Json, Request, status
from tests.kit.http_server import Handler as AnyHandler

KINDS = {path: kind for kind, path in OBJECT_PATHS.items()}
PATCHED = re.compile(r"/api/v1/(namespaces/[^/]+/)?(nodes|services)/[^/]+(/status)?")
EVENTS = re.compile(r"/apis/events\.k8s\.io/v1/namespaces/([^/]+)/events")


class Handler(AnyHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, answer: Callable[[Request, "Handler"], None], *arguments: Any) -> None:
        self._answer = answer
        super().__init__(*arguments)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path in KINDS:
            self._answer(Request(KINDS[url.path], dict(parse_qsl(url.query))), self)
        elif url.path.rpartition("/")[0] in KINDS:
            path, _, name = url.path.rpartition("/")
            self._answer(Request(KINDS[path], {"name": name}), self)
        elif found := document(url.path):
            self.send(200, json.dumps(found).encode())
        else:
            self.refuse(404, f"{url.path} is not here", reason="NotFound")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = EVENTS.fullmatch(self.path)
        assert found, self.path
        assert body["metadata"]["namespace"] == found[1], "the API server refuses others"
        self._answer(Request("Event", {}, body), self)

    def do_PATCH(self) -> None:
        """Patch a Node or a Service; the server decides how the body is applied."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert PATCHED.fullmatch(self.path), self.path
        sent = {"path": self.path, "type": self.headers["Content-Type"], "body": body}
        self._answer(Request("Patch", {}, patched=sent), self)

    def send(self, code: int, body: bytes, encoding: str = "") -> None:
        self.send_response(code)
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, code: int, message: str, **fields: str) -> None:
        self.send(code, json.dumps(status(code, message) | fields).encode())

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_chunk(self, event: Json | bytes | None) -> None:
        if event is not None:
            line = (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n"
            self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))

    def end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def drop(self) -> None:
        """Send half a chunk, then nothing."""
        self.wfile.write(b'40\r\n{"type": "ADDED", "obj')
        self.close_connection = True
