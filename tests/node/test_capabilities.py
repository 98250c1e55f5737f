# SPDX-License-Identifier: Apache-2.0
"""What this process may do, read from what the kernel says of it."""

import pytest

from ebpflb.node import capabilities


def status(*names: str) -> str:
    mask = sum(1 << capabilities.NUMBERS[name] for name in names)
    return f"Name:\tit\nCapPrm:\t{(1 << 41) - 1:016x}\nCapEff:\t{mask:016x}\nCapAmb:\t0\n"


def test_only_effective_ones_count() -> None:
    """What is permitted or in the bounding set is not held."""
    assert capabilities.missing(status()) == list(capabilities.NEEDED)
    assert capabilities.missing(status(*capabilities.NEEDED)) == []


@pytest.mark.parametrize("lost", capabilities.NEEDED)
def test_each_missing_one_is_named(lost: str) -> None:
    """That one, and no other."""
    held = [name for name in capabilities.NEEDED if name != lost]
    assert capabilities.missing(status(*held)) == [lost]


def test_sys_admin_stands_for_bpf() -> None:
    """The kernel takes CAP_SYS_ADMIN for CAP_BPF and CAP_PERFMON, but netlink not for its own."""
    assert capabilities.missing(status("CAP_SYS_ADMIN")) == ["CAP_NET_ADMIN"]
    assert capabilities.missing(status("CAP_SYS_ADMIN", "CAP_NET_ADMIN")) == []
