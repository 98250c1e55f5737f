# SPDX-License-Identifier: Apache-2.0
"""The file of the API servers: written whole or not at all, read whatever it contains."""

import os
from pathlib import Path

import msgspec
import pytest

from ebpflb.agent.reporter import ApiServersFile
from ebpflb.model.api_servers import KeptApiServers
from ebpflb.model.cluster_state import ClusterState

NOBODY = ClusterState("node-1")
ONE = KeptApiServers((("192.0.2.1", 6443),))
TWO = KeptApiServers((("192.0.2.1", 6443), ("192.0.2.2", 6443)))


def test_the_next_agent_reads_what_was_kept(tmp_path: Path) -> None:
    """Only changes are written and told."""
    path, told = tmp_path / "file", list[KeptApiServers]()
    kept = ApiServersFile(path, NOBODY, told.append)
    kept.keep(ONE)
    first = path.stat().st_ino
    kept.keep(ONE)
    assert (path.stat().st_ino, told) == (first, [ONE])
    kept.keep(TWO)
    assert path.stat().st_ino != first  # another file took its place
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600
    again = ApiServersFile(path, NOBODY, told.append)
    assert again.read() == TWO
    again.keep(TWO)
    assert told == [ONE, TWO, TWO]


def test_a_failed_write_leaves_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, told = tmp_path / "file", list[KeptApiServers]()
    kept = ApiServersFile(path, NOBODY, told.append)
    kept.keep(ONE)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    kept.keep(TWO)
    assert ApiServersFile(path, NOBODY).read() == ONE
    assert (told, list(tmp_path.iterdir())) == ([ONE, TWO], [path])
    assert "not kept for the next start: [Errno 28] No space left" in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"endpoints": [["x", 1]]}',
        msgspec.json.encode(ONE) + b" " * (1 << 16),
    ],
)
def test_a_damaged_file_stops_nothing(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert ApiServersFile(path, NOBODY).read() is None
    assert f"{path}: ignored: " in caplog.text


def test_a_pipe_stops_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")
    assert ApiServersFile(tmp_path / "file", NOBODY).read() is None
    assert ApiServersFile(tmp_path / "none", NOBODY).read() is None
