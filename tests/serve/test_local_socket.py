# SPDX-License-Identifier: Apache-2.0
"""The socket in the run directory is for root only, and no client delays another one."""

import socket
import stat
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from ebpflb import unix_socket
from ebpflb.options import Options, Paths
from ebpflb.serve.listener import Request, Response, ServerThread
from ebpflb.serve.servers import HttpServers, LocalSocket
from tests.serve import conftest as serve_conftest
from tests.serve.conftest import SECONDS, FakeRecorder, plain_pages


def respond(request: Request) -> Response:
    return Response(200, f"{request.path} {request.query}".encode())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a path that is longer than an address may be."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    return folder / "agent.sock"


@pytest.fixture
def opened(path: Path, server_thread: ServerThread) -> Iterator[LocalSocket]:
    local = LocalSocket(path, respond, timeout=SECONDS)
    server_thread.run(local.open())
    yield local
    server_thread.run(local.close())


def ask(path: Path, target: str) -> str:
    connection = HTTPConnection("ebpflb")
    connection.sock = unix_socket.connect(path, SECONDS)
    try:
        connection.request("GET", target)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def test_a_handler_gets_path_and_query(opened: LocalSocket, path: Path) -> None:
    assert ask(path, "/v1/service?name=web") == "/v1/service name=web"


def test_no_request_waits_for_another(path: Path, server_thread: ServerThread) -> None:
    """`status` is answered while another command waits for its answer."""
    asked, goes_on = threading.Event(), threading.Event()

    def wait(request: Request) -> Response:
        if request.path == "/v1/audit":
            asked.set()
            goes_on.wait(SECONDS)
        return respond(request)

    local = LocalSocket(path, wait, timeout=SECONDS)
    server_thread.run(local.open())
    other = threading.Thread(target=ask, args=(path, "/v1/audit"))
    other.start()
    assert asked.wait(SECONDS)
    assert ask(path, "/v1/pulse?") == "/v1/pulse "
    assert other.is_alive()
    goes_on.set()
    other.join()
    server_thread.run(local.close())


def test_for_root_alone(opened: LocalSocket, path: Path) -> None:
    """No user other than root may connect."""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_left_by_a_crash(path: Path, server_thread: ServerThread) -> None:
    """A socket or file that an earlier agent left is replaced."""
    for left in ("socket", "file"):
        if left == "file":
            path.write_text("")
        else:
            unix_socket.listen(path).close()
        local = LocalSocket(path, respond)
        server_thread.run(local.open())
        assert ask(path, "/?") == "/ "
        server_thread.run(local.close())
        assert not path.exists()


def test_no_directory(tmp_path: Path, server_thread: ServerThread) -> None:
    """If the socket cannot listen the agent continues, and the log names the consequence."""
    local = LocalSocket(tmp_path / "gone" / "agent.sock", respond)
    server_thread.run(local.open())
    server_thread.run(local.close())
    with pytest.raises(OSError), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "gone" / "agent.sock"))


def test_all_else_is_closed_where_its_file_cannot_be_removed(
    tmp_path: Path,
    own_namespace: None,
    fake_recorder: FakeRecorder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the socket's file cannot be removed, as on a read-only file system, ports, threads and
    events still end, with a log line.
    """
    nowhere = Path("/nonexistent")
    options = Options(Paths(nowhere, tmp_path), "node-1", nowhere)
    servers = HttpServers(options, fake_recorder, plain_pages(), local=respond)
    servers.start()
    options.paths.socket_file.unlink()
    options.paths.socket_file.mkdir()
    servers.stop()
    assert fake_recorder.stopped == 1
    with pytest.raises(ConnectionRefusedError):
        serve_conftest.ask("/healthz", 10256)
    (said,) = (each.message for each in caplog.records if each.levelname == "ERROR")
    assert said.startswith(f"stopping: {options.paths.socket_file}: ")
