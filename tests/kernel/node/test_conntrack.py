# SPDX-License-Identifier: Apache-2.0
"""The conntrack settings that kube-proxy writes at its start (kube-proxy.md 11.3).

They are tested on a fake /proc and in the test's own network namespace.
"""

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import netns

from ebpflb.errors import NodeError
from ebpflb.kernel.node import sysctls as conntrack
from ebpflb.lab.netns import ip as run_ip
from ebpflb.options import ConntrackOptions

NAME = f"ebpflb-test-{os.getpid()}-conntrack"
KERNEL = {  # its own defaults
    "nf_conntrack_max": 65536,
    "nf_conntrack_tcp_timeout_established": 432000,
    "nf_conntrack_tcp_timeout_close_wait": 60,
    "nf_conntrack_tcp_be_liberal": 0,
    "nf_conntrack_udp_timeout": 30,
    "nf_conntrack_udp_timeout_stream": 120,
}


class Sysctls:
    """A kernel's sysctls as files, with four CPUs."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.hash_size = folder / "netfilter", folder / "hashsize"
        self.proc.mkdir()
        for name, value in KERNEL.items():
            (self.proc / name).write_text(f"{value}\n")
        self.hash_size.write_text("16384\n")
        self.written: list[str] = []

    def set_up(self, wanted: ConntrackOptions) -> None:
        conntrack.set_up_conntrack(wanted, self.proc, self.hash_size)

    def changed(self) -> dict[str, int]:
        now = {name: int((self.proc / name).read_text()) for name in KERNEL}
        return {name: value for name, value in now.items() if value != KERNEL[name]}


@pytest.fixture
def sysctls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sysctls:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    return Sysctls(tmp_path)


def refuse(monkeypatch: pytest.MonkeyPatch, number: int, *names: str) -> None:
    """Make writing to files of these names fail."""
    write = Path.write_text

    def refused(path: Path, text: str) -> int:
        if path.name in names:
            raise OSError(number, os.strerror(number))
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", refused)


def test_default_settings_are_those_of_kube_proxy(sysctls: Sysctls) -> None:
    """The timeout of CLOSE_WAIT is an hour, that of established connections a day; the size is 128
    Ki entries; UDP is left alone.
    """
    sysctls.set_up(ConntrackOptions())
    assert sysctls.changed() == {
        "nf_conntrack_max": 131072,
        "nf_conntrack_tcp_timeout_established": 86400,
        "nf_conntrack_tcp_timeout_close_wait": 3600,
    }
    assert int(sysctls.hash_size.read_text()) == 32768


def test_all_that_can_be_chosen(sysctls: Sysctls) -> None:
    """Each setting has its own sysctl."""
    sysctls.set_up(ConntrackOptions(50000, 7, 100, 200, True, 300, 400))
    assert sysctls.changed() == {
        "nf_conntrack_max": 200000,
        "nf_conntrack_tcp_timeout_established": 100,
        "nf_conntrack_tcp_timeout_close_wait": 200,
        "nf_conntrack_tcp_be_liberal": 1,
        "nf_conntrack_udp_timeout": 300,
        "nf_conntrack_udp_timeout_stream": 400,
    }


def test_zero_leaves_alone(sysctls: Sysctls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros write nothing; if maxPerCore is 0 the minimum is ignored."""
    refuse(monkeypatch, errno.EROFS, *KERNEL, "hashsize")
    sysctls.set_up(ConntrackOptions(0, 10**9, 0, 0, False, 0, 0))
    assert sysctls.changed() == {}


@pytest.mark.parametrize(
    ("per_core", "least", "cores", "size"),
    [
        (32768, 131072, 1, 131072),
        (32768, 131072, 8, 262144),
        (32768, 131072, 64, 1048576),
        (32768, 2_000_000, 64, 1048576),
        (32768, 2_000_000, 2, 2_000_000),
        (0, 131072, 64, 0),
    ],
)
def test_table_size(per_core: int, least: int, cores: int, size: int) -> None:
    """The size is maxPerCore times CPUs, but at least min; with more than 1 Mi it is 1 Mi, even
    below min.
    """
    assert conntrack.table_size(ConntrackOptions(per_core, least), cores) == size


def test_size_is_never_lowered(sysctls: Sysctls) -> None:
    """A larger table keeps its size."""
    (sysctls.proc / "nf_conntrack_max").write_text("500000\n")
    sysctls.hash_size.write_text("200000\n")
    sysctls.set_up(ConntrackOptions())
    assert sysctls.changed()["nf_conntrack_max"] == 500000
    assert int(sysctls.hash_size.read_text()) == 200000


def test_right_values_are_not_written(sysctls: Sysctls, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all settings are correct, a read-only /proc/sys is no error."""
    sysctls.set_up(ConntrackOptions())
    refuse(monkeypatch, errno.EROFS, *KERNEL, "hashsize")
    sysctls.set_up(ConntrackOptions())


def test_failure_is_fatal(sysctls: Sysctls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout that cannot be set ends the start; the error names it and its value."""
    refuse(monkeypatch, errno.EROFS, "nf_conntrack_tcp_timeout_close_wait")
    with pytest.raises(NodeError, match=r"close_wait: cannot be set to 3600: Read-only file"):
        sysctls.set_up(ConntrackOptions())


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EOPNOTSUPP])
def test_size_of_another(
    sysctls: Sysctls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """The size belongs to the machine: in other namespaces it stays, and this is only logged."""
    refuse(monkeypatch, number, "nf_conntrack_max", "hashsize")
    sysctls.set_up(ConntrackOptions())
    assert "nf_conntrack_max" not in sysctls.changed()
    assert "nf_conntrack_tcp_timeout_close_wait" in sysctls.changed()
    for line in ("nf_conntrack_max: not set to 131072", "hashsize: not set to 32768"):
        assert line in caplog.text


def test_read_only_hash_size(
    sysctls: Sysctls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If /sys is read-only, as in a container, the hash table stays, and this is only logged."""
    refuse(monkeypatch, errno.EROFS, "hashsize")
    sysctls.set_up(ConntrackOptions())
    assert sysctls.changed()["nf_conntrack_max"] == 131072
    assert "nf_conntrack_tcp_timeout_close_wait" in sysctls.changed()
    assert "hashsize: not set to 32768: Read-only file system" in caplog.text


def test_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A kernel without conntrack gets no settings, and this is logged."""
    caplog.set_level(logging.INFO)
    conntrack.set_up_conntrack(ConntrackOptions(), tmp_path, tmp_path / "hashsize")
    assert caplog.messages == ["conntrack is not loaded: its settings are left alone"]


LIBERAL = "nf_conntrack_tcp_be_liberal"


def test_be_liberal_is_put_back(sysctls: Sysctls, tmp_path: Path) -> None:
    """What was set is put back once, also by a later agent; nothing is put back that was there."""
    record = tmp_path / "liberal"
    for _ in range(2):
        assert conntrack.be_liberal(record, sysctls.proc)
        assert sysctls.changed() == {LIBERAL: 1}
    conntrack.be_strict(record, sysctls.proc)
    assert sysctls.changed() == {}
    (sysctls.proc / LIBERAL).write_text("1\n")
    assert conntrack.be_liberal(record, sysctls.proc)
    conntrack.be_strict(record, sysctls.proc)
    assert sysctls.changed() == {LIBERAL: 1}


@pytest.mark.parametrize("content", [b"1", b"\xff", b"{}"])
def test_a_record_of_another_namespace(sysctls: Sysctls, tmp_path: Path, content: bytes) -> None:
    """Such a record, or a damaged one, changes nothing, and is removed."""
    record = tmp_path / "liberal"
    record.write_bytes(content)
    (sysctls.proc / LIBERAL).write_text("1\n")
    conntrack.be_strict(record, sysctls.proc)
    assert (sysctls.changed(), record.exists()) == ({LIBERAL: 1}, False)


def test_be_liberal_cannot_be_set(
    sysctls: Sysctls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then conntrack is strict; what cannot be put back is tried again by the next call."""
    record = tmp_path / "liberal"
    with monkeypatch.context() as patch:
        refuse(patch, errno.EROFS, LIBERAL)
        assert not conntrack.be_liberal(record, sysctls.proc)
        conntrack.be_strict(record, sysctls.proc)
        assert not record.exists()
    assert conntrack.be_liberal(record, sysctls.proc)
    with monkeypatch.context() as patch:
        refuse(patch, errno.EROFS, LIBERAL)
        conntrack.be_strict(record, sysctls.proc)
        assert sysctls.changed() == {LIBERAL: 1}
    conntrack.be_strict(record, sysctls.proc)
    assert (sysctls.changed(), record.exists()) == ({}, False)


@pytest.fixture
def namespace() -> Iterator[None]:
    """Move the test's thread into a fresh network namespace."""
    run_ip("netns", "add", NAME)
    netns.pushns(NAME)
    try:
        yield
    finally:
        netns.popns()
        netns.remove(NAME)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.skipif(not conntrack.NETFILTER_SYSCTLS.is_dir(), reason="conntrack is not loaded")
def test_close_wait_for_real(namespace: None) -> None:
    """The kernel sets the timeouts in this namespace only, and keeps the machine's size.

    An agent may have set the machine's own timeouts before, so they are compared with their former
    values.
    """
    names = ("nf_conntrack_tcp_timeout_close_wait", "nf_conntrack_tcp_timeout_established")
    netns.popns()
    try:
        before = [(conntrack.NETFILTER_SYSCTLS / name).read_text() for name in names]
    finally:
        netns.pushns(NAME)
    conntrack.set_up_conntrack(
        ConntrackOptions(max_per_core=2**20, min_total=2**30, close_wait=3601, established=86401)
    )
    assert [int((conntrack.NETFILTER_SYSCTLS / name).read_text()) for name in names] == [
        3601,
        86401,
    ]
    netns.popns()
    try:
        assert [(conntrack.NETFILTER_SYSCTLS / name).read_text() for name in names] == before
    finally:
        netns.pushns(NAME)
