# SPDX-License-Identifier: Apache-2.0
"""`ebpflb run` with flags that end it before it serves (kube-proxy.md 15)."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ebpflb.config import config_file
from ebpflb.kernel.node import sysctls
from ebpflb.options import ConntrackOptions
from tests.cli.conftest import NEVER, Ebpflb
from tests.config.files import write


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.conf"


def test_write_config_to(ebpflb: Ebpflb, file: Path) -> None:
    """What the flags say is written, whole, and reads back the same."""
    words = ["--cluster-cidr=10.0.0.0/8", "--iptables-min-sync-period=2s", "--node-name=a"]
    assert ebpflb("run", "--write-config-to", file, *words).status == 0
    found = config_file.read(file)
    assert (found.cluster_cidr, found.hostname_override) == ("10.0.0.0/8", "a")
    assert found.mode_section.min_sync_period == 2 * 10**9
    other = file.with_suffix(".other")
    assert ebpflb("run", "--config", file, "--write-config-to", other).status == 0
    assert other.read_text() == file.read_text()


def test_write_config_nowhere(ebpflb: Ebpflb, file: Path) -> None:
    """An error if the file cannot be written."""
    target = file / "x"
    done = ebpflb("run", "--write-config-to", target)
    assert done.status == 1
    assert done.err == f"ebpflb: {target}: No such file or directory\n"


def test_init_only(ebpflb: Ebpflb, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--init-only sets what conntrack is to have, and ends."""
    seen: list[Any] = []
    monkeypatch.setattr(sysctls, "set_up_conntrack", seen.append)
    write(file, conntrack={"maxPerCore": 0, "tcpCloseWaitTimeout": "5s"})
    assert ebpflb("run", "--init-only", "--config", file).status == 0
    assert seen == [ConntrackOptions(max_per_core=0, close_wait=5)]


def test_cleanup(ebpflb: Ebpflb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """--cleanup removes ours and what kube-proxy left, even where the file is bad, and ends."""
    seen: list[Any] = []
    monkeypatch.setattr(import_module("ebpflb.cli.cleanup"), "remove_all", seen.append)
    where = ["--state-dir", NEVER, "--run-dir", tmp_path]
    assert ebpflb("run", "--cleanup", "--config=/nowhere", *where).status == 0
    assert [paths.state for paths in seen] == [NEVER]


def test_version(ebpflb: Ebpflb) -> None:
    """--version says it."""
    assert ebpflb("run", "--version").out.startswith("ebpflb, version ")
