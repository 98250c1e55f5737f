# SPDX-License-Identifier: Apache-2.0
"""`ebpflb ui` as a separate process, bounded whatever its clients do."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from ebpflb.lab.agents import wait_until
from tests.page.asgi import Node, api

SECONDS = 60.0
TOKEN = "0123456789abcdef0123"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Return the port of a server in this process, which closes connections after half a second of
    idleness.
    """
    import asyncio

    from ebpflb_page import web_server

    monkeypatch.setattr(web_server, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(web_server.Reaper.__init__, "__defaults__", (0.5,))
    listen = web_server.Listen("127.0.0.1", 0)
    opened = web_server.listening(listen)
    server = web_server.server(api(Node()), listen)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([opened])))
    thread.start()
    try:
        yield opened.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        opened.close()


def get(port: int, path: str = "/api/status", **headers: str) -> tuple[int, bytes]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=SECONDS)) as connection:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()


def ended(client: socket.socket) -> bool:
    """Whether the server has closed the connection."""
    client.settimeout(SECONDS)
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return True


@pytest.mark.parametrize(
    "sent", [b"", b"GET /api/status HT", b"GET / HTTP/1.1\r\nhost: localhost\r\n"]
)
def test_a_client_that_never_asks_is_disconnected(port: int, sent: bytes) -> None:
    """A client that sends no request is disconnected, and others are answered all the time."""
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(sent)
        assert get(port)[0] == 200
        assert ended(slow)
    assert get(port)[0] == 200


def test_too_many_clients_are_refused_until_others_have_gone(port: int) -> None:
    """Clients beyond the limit are refused; an idle client keeps its place for at most
    IDLE_SECONDS.
    """
    from ebpflb_page.web_server import MOST_CONNECTIONS

    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS + 5):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        wait_until("the page answers again", lambda: get(port)[0] == 200, SECONDS)


@pytest.fixture
def nowhere(tmp_path: Path) -> Iterator[list[str]]:
    """Return a directory where no agent has ever been, in a bpffs without any state directory."""
    folder = tmp_path / "bpffs"
    folder.mkdir()
    subprocess.run(["mount", "-t", "bpf", "bpf", str(folder)], check=True)
    yield ["--state-dir", str(folder / "never"), "--run-dir", str(tmp_path)]
    subprocess.run(["umount", str(folder)], check=True)


def started(*options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-m", "ebpflb", "ui", "--listen", "127.0.0.1:0", *options]
    pipe: Any = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_by_signal_without_a_word(nowhere: list[str], number: signal.Signals) -> None:
    """The server ends by a signal without output; the page says if there is no agent, as `ebpflb
    status` does.
    """
    process = started(*nowhere)
    try:
        assert process.stdout
        url = process.stdout.readline().split()[0]
        status, body = get(int(url.rstrip("/").rpartition(":")[2]))
        assert (status, b"DOWN" in body) == (200, True)
        status, body = get(int(url.rstrip("/").rpartition(":")[2]), "/api/services")
        assert (status, b"only the agent knows" in body) == (503, True)
        process.send_signal(number)
        said = process.communicate(timeout=SECONDS)
        assert said == ("", "")
        assert process.returncode in (0, -number)
    finally:
        process.kill()
        process.communicate()


def test_the_token_is_in_no_output(nowhere: list[str], tmp_path: Path) -> None:
    """Neither a correct nor a wrong request makes the token appear in the output."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    process = started(*nowhere, "--token-file", str(file))
    try:
        assert process.stdout
        port = int(process.stdout.readline().split()[0].rstrip("/").rpartition(":")[2])
        assert get(port)[0] == 401
        assert get(port, authorization=f"Bearer {TOKEN}")[0] == 200
        assert get(port, f"/api/{TOKEN}", authorization=f"Bearer {TOKEN}")[0] == 404
        assert get(port, authorization=f"Bearer {TOKEN}x")[0] == 401
        process.terminate()
        assert TOKEN not in "".join(process.communicate(timeout=SECONDS))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--listen", "0.0.0.0:0"], "add --token-file"),
        (["--listen", "[::]:0"], "add --token-file"),
        (["--token-file", "/nowhere/token"], "--token-file /nowhere/token"),
        (["--token-file", "/dev/null"], "not a token of 16 or more"),
        (["--listen", "localhost:1"], "is not an IP address"),
        (["--listen", "127.0.0.1:65536"], "is not a port from 0 to 65535"),
        (["--listen", "192.0.2.99:1", "--token-file", "{token}"], "--listen 192.0.2.99:1: Cannot"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, options: list[str], text: str) -> None:
    """An impossible option gives an error of one sentence, before anything listens."""
    (tmp_path / "token").write_text(TOKEN)
    options = [it.format(token=tmp_path / "token") for it in options]
    command = [sys.executable, "-P", "-m", "ebpflb", "ui", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode in (1, 2)
    assert text in done.stderr and "Traceback" not in done.stderr and TOKEN not in done.stderr


def test_connections_that_do_nothing_are_ended_and_no_others() -> None:
    """Idle or closing connections are ended; a connection whose request is being answered may take
    its time.
    """
    from ebpflb_page.web_server import Reaper

    class Connection:
        def __init__(self, cycle: Any, *, closing: bool = False) -> None:
            self.cycle, self.transport, self.aborted, self._closing = cycle, self, False, closing

        def is_closing(self) -> bool:
            return self._closing

        def abort(self) -> None:
            self.aborted = True

    answering, done = (type("Cycle", (), {"response_complete": it})() for it in (False, True))
    busy, new = Connection(answering), Connection(None)
    kept, stuck = Connection(done), Connection(answering, closing=True)
    reaper = Reaper(lambda: {busy, new, kept, stuck}, 10.0)
    for now in (0.0, 9.9, 10.0):
        assert not any(it.aborted for it in (busy, new, kept, stuck))
        reaper.look(now)
    assert [it.aborted for it in (busy, new, kept, stuck)] == [False, True, True, True]
