# SPDX-License-Identifier: Apache-2.0
"""Where sysctls are written: at the host's mount in a container, else where they are."""

from pathlib import Path

import pytest

from ebpflb.kernel.node import sysctls

NAME = "net/ipv4/ip_forward"


def test_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is mounted: /proc/sys itself."""
    monkeypatch.setattr(sysctls, "HOST", tmp_path)
    assert sysctls.sysctl_path(NAME) == Path("/proc/sys", NAME)


def test_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mounted there is written; what is not is looked for where it always is."""
    monkeypatch.setattr(sysctls, "HOST", tmp_path)
    (tmp_path / "net/ipv4").mkdir(parents=True)
    (tmp_path / NAME).touch()
    assert sysctls.sysctl_path(NAME) == tmp_path / NAME
    assert sysctls.sysctl_path("net/ipv4/other") == Path("/proc/sys/net/ipv4/other")
