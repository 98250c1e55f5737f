# SPDX-License-Identifier: Apache-2.0
"""A fake API server of pods for kubectl: lists, shows, logs, and `exec` by WebSocket.

The protocol is v5.channel.k8s.io: the first byte of a message is its stream (0 stdin, 1 stdout, 2
stderr, 3 the exit status), and 255 closes one.
"""

import base64
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha1
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.kit.http_server import Handler, Server

Pod = dict[str, Any]
Execute = Callable[[str, list[str], bytes], tuple[int, bytes, bytes]]
"""From a pod's name, the command and its stdin to the exit status, stdout and stderr."""

_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455
_TEXT_AND_BINARY, _CLOSE, _PING, _PONG = (1, 2), 8, 9, 10
_STDIN, _STDOUT, _STDERR, _STATUS, _CLOSE_STREAM = 0, 1, 2, 3, 255
_RESOURCES = {
    "kind": "APIResourceList",
    "groupVersion": "v1",
    "resources": [{"name": "pods", "namespaced": True, "kind": "Pod", "verbs": ["get", "list"]}],
}


def pod(name: str, node: str, address: str, namespace: str = "kube-system", *, runs: bool = True,
        labels: dict[str, str] | None = None, host: bool = False) -> Pod:  # fmt: skip
    """Return a pod with one container "ebpflb"."""
    state = {"running": {}} if runs else {"waiting": {"reason": "CrashLoopBackOff"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
        "spec": {"nodeName": node, "containers": [{"name": "ebpflb"}], "hostNetwork": host},
        "status": {
            "phase": "Running",
            "podIP": address,
            "containerStatuses": [{"name": "ebpflb", "state": state}],
        },
    }


class _Handler(Handler):
    protocol_version = "HTTP/1.1"
    pods: list[Pod]
    execute: Execute
    log: Callable[[], str]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query, parts = parse_qs(url.query), url.path.strip("/").split("/")
        if url.path == "/api":
            self._send({"kind": "APIVersions", "versions": ["v1"]})
        elif url.path == "/apis":
            self._send({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})
        elif url.path == "/api/v1":
            self._send(_RESOURCES)
        elif parts[-1] == "pods":
            self._send({"kind": "PodList", "apiVersion": "v1", "items": self._listed(parts, query)})
        elif parts[-2] == "namespaces":
            meta = {"name": parts[-1]}
            self._send({"kind": "Namespace", "apiVersion": "v1", "metadata": meta})
        elif parts[-1] == "exec":
            self._exec(parts[5], query)
        elif parts[-1] == "log":
            self._answer(200, type(self).log().encode(), "text/plain")
        else:
            self._one(parts)

    def _listed(self, parts: list[str], query: dict[str, list[str]]) -> list[Pod]:
        found = [
            it for it in self.pods if len(parts) == 3 or it["metadata"]["namespace"] == parts[3]
        ]
        for selector in query.get("labelSelector", []):
            name, _, value = selector.partition("=")
            found = [it for it in found if it["metadata"]["labels"].get(name) == value]
        for selector in query.get("fieldSelector", []):
            assert selector.startswith("status.podIP="), selector
            found = [it for it in found if it["status"]["podIP"] == selector.partition("=")[2]]
        return found

    def _one(self, parts: list[str]) -> None:
        for each in self.pods:
            if [each["metadata"][it] for it in ("namespace", "name")] == [parts[3], parts[5]]:
                self._send(each)
                return
        said = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
        self._send({**said, "reason": "NotFound", "message": f'pods "{parts[-1]}" not found'}, 404)

    def _send(self, value: object, status: int = 200) -> None:
        self._answer(status, json.dumps(value).encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _exec(self, name: str, query: dict[str, list[str]]) -> None:
        assert self.headers["Sec-WebSocket-Protocol"] == "v5.channel.k8s.io", self.headers
        key = (self.headers["Sec-WebSocket-Key"] + _GUID).encode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(sha1(key).digest()).decode())
        self.send_header("Sec-WebSocket-Protocol", "v5.channel.k8s.io")
        self.end_headers()
        given = self._stdin() if "stdin" in query else b""
        self._sending = threading.Lock()
        threading.Thread(target=self._answer_pings, daemon=True).start()
        status, out, err = type(self).execute(name, query["command"], given)
        for stream, data in ((_STDOUT, out), (_STDERR, err)):
            for at in range(0, len(data), 1 << 14):
                self._frame(2, bytes([stream]) + data[at : at + (1 << 14)])
        self._frame(2, bytes([_STATUS]) + json.dumps(_status(status)).encode())
        self._frame(_CLOSE, struct.pack(">H", 1000))
        self.connection.shutdown(socket.SHUT_RD)
        self.close_connection = True

    def _answer_pings(self) -> None:
        """Until the end: kubectl gives up after a minute without an answer."""
        with suppress(OSError, ValueError):
            while True:
                kind, data = self._read_frame()
                if kind == _PING:
                    self._frame(_PONG, data)

    def _frame(self, kind: int, data: bytes) -> None:
        size = bytes([len(data)]) if len(data) < 126 else b"\x7e" + struct.pack(">H", len(data))
        with self._sending:
            self.wfile.write(bytes([0x80 | kind]) + size + data)

    def _stdin(self) -> bytes:
        """Return the input until the client closes the stream."""
        given = b""
        while True:
            kind, data = self._read_frame()
            if kind in _TEXT_AND_BINARY and data[:2] == bytes([_CLOSE_STREAM, _STDIN]):
                return given
            given += data[1:] if kind in _TEXT_AND_BINARY else b""

    def _read_frame(self) -> tuple[int, bytes]:
        first, size = self.rfile.read(2)
        size &= 0x7F
        if size >= 126:
            form = ">H" if size == 126 else ">Q"
            (size,) = struct.unpack(form, self.rfile.read(struct.calcsize(form)))
        mask, data = self.rfile.read(4), self.rfile.read(size)
        return first & 0xF, bytes(each ^ mask[at % 4] for at, each in enumerate(data))


def _status(code: int) -> dict[str, Any]:
    if not code:
        return {"kind": "Status", "status": "Success"}
    causes = [{"reason": "ExitCode", "message": str(code)}]
    said = {"reason": "NonZeroExitCode", "message": "it failed", "details": {"causes": causes}}
    return {"kind": "Status", "status": "Failure", **said}


@contextmanager
def serving(pods: list[Pod], execute: Execute, log: Callable[[], str]) -> Iterator[str]:
    """Serve; yield the URL. ``log``: returns each pod's."""
    fields = {"pods": pods, "execute": staticmethod(execute), "log": staticmethod(log)}
    with Server(("127.0.0.1", 0), type("Handler", (_Handler,), fields)) as server:
        yield f"http://127.0.0.1:{server.server_port}"
