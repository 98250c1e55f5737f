# SPDX-License-Identifier: Apache-2.0
"""Ports that are kept from the host, in a network namespace of the test's own."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ebpflb.kernel.node import sysctls
from tests.kernel.node import nodes
from tests.kit.hostile_files import HOSTILE, lay


@pytest.fixture
def record(tmp_path: Path, fresh_netns: None) -> Path:
    """Return the file that remembers the ports; the test's thread is in a fresh namespace."""
    return tmp_path / "added"


def reserved() -> str:
    return sysctls.RESERVED.read_text().strip()


def test_reserved(record: Path) -> None:
    """The range is reserved beside what others reserved, and released without touching that."""
    sysctls.RESERVED.write_text("8080,20005-20010\n")
    sysctls.reserve_ports(record, 20000, 20019)
    assert reserved() == "8080,20000-20019"
    sysctls.release_ports(record)
    assert reserved() == "8080,20005-20010"
    assert not record.exists()


def test_other_range(record: Path) -> None:
    """With another range the former one is given back."""
    sysctls.reserve_ports(record, 20000, 20009)
    sysctls.reserve_ports(record, 20008, 20019)
    assert reserved() == "20008-20019"


def test_other_namespace(record: Path) -> None:
    """What was added in another network namespace is not taken away here."""
    sysctls.reserve_ports(record, 20000, 20009)
    with nodes.fresh(f"ebpflb-test-{os.getpid()}-other"):
        sysctls.RESERVED.write_text("20000-20009\n")
        sysctls.release_ports(record)
        assert reserved() == "20000-20009"


def test_not_writable(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the list cannot be written, the reason is logged in one line."""
    monkeypatch.setattr(sysctls, "RESERVED", record.parent / "missing")
    reason = sysctls.try_to_reserve_ports(record, 20000, 20009)
    assert reason == f"{record.parent}/missing: No such file or directory"


def test_refused(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be added is not taken away later, and what was added before is."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    sysctls.RESERVED.write_text("30005\n")
    sysctls.reserve_ports(record, 20000, 20009)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", refuse)
        reason = sysctls.try_to_reserve_ports(record, 30000, 30009)
    assert reason == f"{sysctls.RESERVED}: Read-only file system"
    sysctls.RESERVED.write_text("20000-20009,30000-30009\n")
    sysctls.release_ports(record)
    assert reserved() == "30000-30009"


@pytest.mark.parametrize("ports", ["1-", "x", "-3", "0-99999999999", "70000"])
def test_a_record_of_no_ports(record: Path, caplog: pytest.LogCaptureFixture, ports: str) -> None:
    """It is named, and counts as none: what the kernel's list has is others'."""
    netns_number = os.stat("/proc/self/ns/net").st_ino
    record.write_text(json.dumps({"netns": netns_number, "ports": ports}))
    sysctls.reserve_ports(record, 20000, 20009)
    assert reserved() == "20000-20009"
    assert str(record) in caplog.text
    sysctls.release_ports(record)
    assert reserved() == ""


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_anything_in_the_place_of_the_record(record: Path, make: Callable[[Path], None]) -> None:
    """The ports are reserved, or it is said why not; nothing waits."""
    lay(make, record)
    said = sysctls.try_to_reserve_ports(record, 20000, 20009)
    assert (said is None) == (reserved() == "20000-20009")
    assert said is None or str(record) in said
