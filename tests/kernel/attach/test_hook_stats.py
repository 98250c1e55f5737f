# SPDX-License-Identifier: Apache-2.0
"""Run times of hooks, with real programs, as the kernel counts them."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ebpflb.kernel import bpf
from ebpflb.kernel.attach import cgroup_links, device_programs
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs.loader import SECTIONS, Program
from tests.kernel.variants import needs_root

pytestmark = needs_root


@pytest.fixture
def counting() -> Iterator[None]:
    """Have the kernel count run times meanwhile."""
    fd = bpf.enable_stats()
    yield
    os.close(fd)


def connect() -> None:
    """Connect to a port without a listener."""
    with socket.socket() as client, suppress(OSError):
        client.connect(("127.0.0.1", 1))


def test_of_loaded_programs(
    home: StateDir, inside: Path, loaded: list[Program], counting: None
) -> None:
    """Only the hook that runs once more has another run, and more time."""
    cgroup_links.attach(home, inside, loaded)
    before = device_programs.run_times(loaded)
    assert set(before) == {section.partition("/")[2] for section in SECTIONS}
    connect()
    after = device_programs.run_times(loaded)
    unpin_all(home)
    assert after["connect4"].runs == before["connect4"].runs + 1
    assert after["connect4"].seconds > before["connect4"].seconds
    assert after["connect6"] == before["connect6"]


def test_enabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result follows the sysctl; a kernel without the sysctl counts nothing."""
    switch = tmp_path / "bpf_stats_enabled"
    monkeypatch.setattr(device_programs, "STATS_SWITCH", switch)
    assert not device_programs.statistics_enabled()
    for text, expected in (("0\n", False), ("1\n", True)):
        switch.write_text(text)
        assert device_programs.statistics_enabled() == expected
