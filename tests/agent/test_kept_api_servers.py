# SPDX-License-Identifier: Apache-2.0
"""The API servers' file is written completely or not at all, and any content can be read."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ebpflb.agent.loop import Turn
from ebpflb.agent.reporter import ApiServersFile
from ebpflb.model.api_servers import KeptApiServers
from ebpflb.options import Options, Paths

ONE = KeptApiServers((("192.0.2.1", 6443),))
TWO = KeptApiServers((("192.0.2.1", 6443), ("192.0.2.2", 6443)))


class Kept:
    """Agents, one after another; ``told`` has the URLs that each change has named."""

    def __init__(self, folder: Path) -> None:
        paths = Paths(folder, folder, folder)
        self.options = Options(paths, "node-1", folder, api_servers=("https://192.0.2.9",))
        self.path, self.told = paths.api_servers_file, list[list[str]]()

    def agent(self) -> ApiServersFile:
        self.cluster: Any = Mock(complete=True)
        made = ApiServersFile(self.options, self.cluster, self.told.append)
        made.started()
        return made

    def turn(self, made: ApiServersFile, found: KeptApiServers) -> None:
        self.cluster.api_servers = lambda: found
        made.observe(Turn(seconds=0.1))


def test_the_next_agent_reads_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only changes are written and reported; a failed write leaves the former file."""
    kept = Kept(tmp_path)
    first = kept.agent()
    for found in (ONE, ONE, TWO):
        kept.turn(first, found)
    assert kept.told == [ONE.urls, TWO.urls]
    assert kept.path.stat().st_mode & 0o777 == 0o600

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    kept.turn(first, ONE)
    assert "not kept for the next start: [Errno 28] No space left" in caplog.text
    kept.agent()
    assert kept.told[2:] == [ONE.urls, TWO.urls]
    assert list(tmp_path.iterdir()) == [kept.path]


@pytest.mark.parametrize(
    "content", [b"", b"[" * 100_000, b'{"endpoints": [["x", 1]]}', b" " * (1 << 17)]
)
def test_a_damaged_file_stops_nothing(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(tmp_path)
    kept.path.write_bytes(content)
    kept.agent()
    assert kept.told == []
    assert f"{kept.path}: ignored: " in caplog.text
