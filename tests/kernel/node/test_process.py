# SPDX-License-Identifier: Apache-2.0
"""The capabilities of this process, and its oom_score_adj, on a fake /proc."""

import logging
from pathlib import Path

import pytest

from ebpflb.kernel.node import namespaces


def test_oom_score_adj(tmp_path: Path) -> None:
    """The chosen value is written to the process's oom_score_adj."""
    path = tmp_path / "oom_score_adj"
    path.write_text("0\n")
    namespaces.adjust_oom_score(-999, path)
    assert path.read_text() == "-999\n"


def test_not_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the value cannot be set, this is logged, and nothing else happens."""
    caplog.set_level(logging.INFO)
    namespaces.adjust_oom_score(-999, tmp_path / "missing")
    assert caplog.messages == ["oom_score_adj: not set to -999: No such file or directory"]


def status(*names: str) -> str:
    mask = sum(1 << namespaces.CAPABILITIES[name] for name in names)
    return f"Name:\tit\nCapPrm:\t{(1 << 41) - 1:016x}\nCapEff:\t{mask:016x}\nCapAmb:\t0\n"


@pytest.mark.parametrize("lost", namespaces.NEEDED_CAPABILITIES)
def test_each_missing_one_is_named(lost: str) -> None:
    """Exactly the missing capability is named."""
    held = [name for name in namespaces.NEEDED_CAPABILITIES if name != lost]
    assert namespaces.missing_capabilities(status(*held)) == [lost]


def test_sys_admin_stands_for_bpf() -> None:
    """CAP_SYS_ADMIN replaces CAP_BPF and CAP_PERFMON, but not the capability for netlink."""
    assert namespaces.missing_capabilities(status("CAP_SYS_ADMIN")) == ["CAP_NET_ADMIN"]
    assert namespaces.missing_capabilities(status("CAP_SYS_ADMIN", "CAP_NET_ADMIN")) == []


def test_the_machines_clock(tmp_path: Path) -> None:
    """This process has the machine's clock, also if the kernel has no time namespaces."""
    assert namespaces.clock_shift() == namespaces.clock_shift(tmp_path / "missing") == 0


@pytest.mark.parametrize(
    ("seconds", "nanoseconds", "shift"), [(1000, 0, 1000.0), (-1, 500_000_000, -0.5)]
)
def test_the_clock_of_a_time_namespace(
    tmp_path: Path, seconds: int, nanoseconds: int, shift: float
) -> None:
    """The offset is read as the kernel writes it."""
    clocks = tmp_path / "timens_offsets"
    clocks.write_text(f"monotonic  {seconds:10} {nanoseconds:9}\nboottime  5  0\n")
    assert namespaces.clock_shift(clocks) == shift


@pytest.mark.parametrize(
    ("own", "first", "sees"),
    [
        ("/", "/", False),  # the only container of a pod
        ("/", "/../cri-pause.scope", False),  # its processes are shared in a pod
        ("/", "/../../../init.scope", True),  # kind: the node is a container with systemd
        ("/kubepods/pod1/a", "/kubepods/pod1/a", False),  # cgroups of the machine are shown
        ("/kubepods/pod1/a", "/kubepods/pod1/b", False),
        ("/kubepods/pod1/a", "/init.scope", True),
    ],
)
def test_whose_processes_are_seen(tmp_path: Path, own: str, first: str, sees: bool) -> None:
    """The first process of a PID namespace shows whether this is the machine's namespace."""
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    (tmp_path / "1").mkdir()
    for name, cgroup in (("self", own), ("1", first)):
        (tmp_path / name / "cgroup").write_text(f"1:name=systemd:/x\n0::{cgroup}\n")
    assert namespaces.sees_the_machine(tmp_path) == sees
