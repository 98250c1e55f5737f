# SPDX-License-Identifier: Apache-2.0
"""A network namespace for tests that listen, with our servers and a client."""

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ebpflb.cluster.event_recorder import EventRecorder, Reference, Severity
from ebpflb.options import Options, Paths
from ebpflb.serve.listener import Connections, Listener, ServerThread, listen
from ebpflb.serve.servers import HttpServers, MetricsPages
from tests.serve.answers import respond

NODE = "node-1"
SECONDS = 60  # until a test gives up waiting
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class RecordedEvent(NamedTuple):
    about: Reference
    severity: str
    reason: str
    action: str
    note: str


class FakeRecorder(EventRecorder):
    """A recorder that keeps its events."""

    def __init__(self) -> None:
        self.events: list[RecordedEvent] = []
        self.started = self.stopped = 0

    def start(self) -> None:
        self.started += 1

    def event(
        self, about: Reference, severity: Severity, reason: str, action: str, note: str
    ) -> None:
        self.events.append(RecordedEvent(about, severity, reason, action, note))

    def stop(self) -> None:
        self.stopped += 1

    @property
    def reasons(self) -> list[str]:
        return [event.reason for event in self.events]


class Reply(NamedTuple):
    code: int
    body: str
    headers: dict[str, str]


def ask(
    path: str, port: int, host: str = "127.0.0.1", *, method: str = "GET", **headers: str
) -> Reply:
    """Send a request over a separate connection. Raises OSError."""
    connection = HTTPConnection(host, port, timeout=SECONDS)
    try:
        connection.request(method, path, headers=headers)
        response: HTTPResponse = connection.getresponse()
        return Reply(response.status, response.read().decode(), dict(response.getheaders()))
    finally:
        connection.close()


Serve = Callable[..., HttpServers]


@pytest.fixture
def own_namespace() -> Iterator[None]:
    """Move this thread, and threads that it starts, into a new network namespace."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    assert _libc.unshare(_CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    try:
        Path("/proc/sys/net/ipv6/conf/all/accept_dad").write_text("0")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        yield
    finally:
        assert _libc.setns(home, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(home)


@pytest.fixture
def fake_recorder() -> FakeRecorder:
    return FakeRecorder()


@pytest.fixture
def serve(own_namespace: None, fake_recorder: FakeRecorder) -> Iterator[Serve]:
    """Start the servers; ``chosen`` has options, or arguments of the servers."""
    started: list[HttpServers] = []

    def serve(
        pages: MetricsPages | None = None, on_response: Any = None, **chosen: Any
    ) -> HttpServers:
        server_options: dict[str, Any] = {
            name: chosen.pop(name) for name in ("families", "retry") if name in chosen
        }
        server_options |= {"on_response": on_response} if on_response else {}
        nowhere = Path("/nonexistent")
        options = Options(Paths(nowhere), NODE, nowhere, **chosen)
        started.append(
            HttpServers(options, fake_recorder, pages or plain_pages(), **server_options)
        )
        started[-1].start()
        return started[-1]

    yield serve
    for servers in started:
        servers.stop()


class PlainMetrics:
    """Expositions with fixed content; ``checks`` are those that were counted."""

    def __init__(self) -> None:
        self.checks = list[str]()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        return f"metrics for {accept}".encode(), "text/metrics"

    def slis_exposition(self, accept: str) -> tuple[bytes, str]:
        return f"slis for {accept}".encode(), "text/slis"

    def check(self, name: str, type: str, *, ok: bool) -> None:
        self.checks.append(name)


def plain_pages(**others: Any) -> MetricsPages:
    """Return pages with fixed content."""
    plain: dict[str, Any] = {"metrics": PlainMetrics(), "configuration": {}, "flags": {}}
    return MetricsPages(**(plain | others))


@pytest.fixture(scope="module")
def server_thread() -> Iterator[ServerThread]:
    server_thread = ServerThread()
    server_thread.start()
    yield server_thread
    server_thread.stop()


@pytest.fixture(scope="module")
def open_listener(server_thread: ServerThread) -> Iterator[Callable[..., int]]:
    """Open a listener with this connection limit and timeout; return its port."""
    listeners: list[Listener] = []

    def open_listener(limit: int = 16, timeout: float = 30.0, threads: int = 0) -> int:
        listeners.append(Listener(respond, Connections(limit, timeout), threads=threads))
        server_thread.run(listeners[-1].open(listen("127.0.0.1", 0)))
        return listeners[-1].address[1]

    yield open_listener

    async def close() -> None:
        for listener in listeners:
            await listener.close()

    server_thread.run(close())
