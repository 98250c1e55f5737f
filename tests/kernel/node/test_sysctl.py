# SPDX-License-Identifier: Apache-2.0
"""Where sysctls are written: through the host's mount in a container, otherwise in /proc/sys."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ebpflb.kernel.node import sysctls
from ebpflb.model.addresses import Family
from tests.kernel.node import nodes
from tests.kit.hostile_files import HOSTILE, lay

NAME = "net/ipv4/ip_forward"


def test_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mount, /proc/sys itself is used."""
    monkeypatch.setattr(sysctls, "HOST", tmp_path)
    assert sysctls.sysctl_path(NAME) == Path("/proc/sys", NAME)


def test_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sysctl that the mount has is written there; any other sysctl is written in /proc/sys."""
    monkeypatch.setattr(sysctls, "HOST", tmp_path)
    (tmp_path / "net/ipv4").mkdir(parents=True)
    (tmp_path / NAME).touch()
    assert sysctls.sysctl_path(NAME) == tmp_path / NAME
    assert sysctls.sysctl_path("net/ipv4/other") == Path("/proc/sys/net/ipv4/other")


# The families that the kernel supports (kube-proxy.md 1.3).


@pytest.mark.parametrize(
    ("disabled", "has_devices", "v6"),
    [("0", True, True), ("1", True, False), ("0", False, False), (None, False, False)],
)
def test_ipv6_is_supported_unless_it_is_disabled(
    tmp_path: Path, disabled: str | None, has_devices: bool, v6: bool
) -> None:
    """IPv6 needs /proc/net/if_inet6 and must not be disabled; IPv4 is always supported."""
    switch = tmp_path / "sys/net/ipv6/conf/all/disable_ipv6"
    if disabled is not None:
        switch.parent.mkdir(parents=True)
        switch.write_text(f"{disabled}\n")
    if has_devices:
        (tmp_path / "net").mkdir()
        (tmp_path / "net/if_inet6").touch()
    expected = set(Family) if v6 else {Family.IPV4}
    assert sysctls.supported_families(tmp_path) == expected


# Ports that are kept from the host, in a network namespace of the test's own.


@pytest.fixture
def record(tmp_path: Path, fresh_netns: None) -> Path:
    """Return the record file of the reserved ports; the test's thread is in a fresh namespace."""
    return tmp_path / "added"


def reserved() -> str:
    return sysctls.RESERVED.read_text().strip()


def test_the_range_is_added_and_released(record: Path) -> None:
    """The range is added to the ports that other programs reserved, and released without touching
    those.
    """
    sysctls.RESERVED.write_text("8080,20005-20010\n")
    sysctls.reserve_ports(record, 20000, 20019)
    assert reserved() == "8080,20000-20019"
    sysctls.release_ports(record)
    assert reserved() == "8080,20005-20010"
    assert not record.exists()


def test_other_range(record: Path) -> None:
    """A new range replaces the former one."""
    sysctls.reserve_ports(record, 20000, 20009)
    sysctls.reserve_ports(record, 20008, 20019)
    assert reserved() == "20008-20019"


def test_other_namespace(record: Path) -> None:
    """Ports that were added in another network namespace are not removed here."""
    sysctls.reserve_ports(record, 20000, 20009)
    with nodes.fresh(f"ebpflb-test-{os.getpid()}-other"):
        sysctls.RESERVED.write_text("20000-20009\n")
        sysctls.release_ports(record)
        assert reserved() == "20000-20009"


def test_not_writable(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the list cannot be written, the reason is logged in one line."""
    monkeypatch.setattr(sysctls, "RESERVED", record.parent / "missing")
    reason = sysctls.reserve_ports(record, 20000, 20009)
    assert reason == f"{record.parent}/missing: No such file or directory"


def test_a_refused_port_is_not_removed_later(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that could not be added is not removed later; only added ports are."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    sysctls.RESERVED.write_text("30005\n")
    sysctls.reserve_ports(record, 20000, 20009)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", refuse)
        reason = sysctls.reserve_ports(record, 30000, 30009)
    assert reason == f"{sysctls.RESERVED}: Read-only file system"
    sysctls.RESERVED.write_text("20000-20009,30000-30009\n")
    sysctls.release_ports(record)
    assert reserved() == "30000-30009"


@pytest.mark.parametrize("ports", ["1-", "x", "-3", "0-99999999999", "70000"])
def test_a_record_of_no_ports(record: Path, caplog: pytest.LogCaptureFixture, ports: str) -> None:
    """An invalid record is named and ignored: all ports in the kernel's list stay."""
    netns_number = os.stat("/proc/self/ns/net").st_ino
    record.write_text(json.dumps({"netns": netns_number, "ports": ports}))
    sysctls.reserve_ports(record, 20000, 20009)
    assert reserved() == "20000-20009"
    assert str(record) in caplog.text
    sysctls.release_ports(record)
    assert reserved() == ""


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_anything_in_the_place_of_the_record(record: Path, make: Callable[[Path], None]) -> None:
    """Whatever is in place of the record, the ports are reserved, or the log says why not; nothing
    blocks.
    """
    lay(make, record)
    said = sysctls.reserve_ports(record, 20000, 20009)
    assert (said is None) == (reserved() == "20000-20009")
    assert said is None or str(record) in said
