# SPDX-License-Identifier: Apache-2.0
"""Whether bridges hand packets to netfilter, by the sysctls of the test's own namespace."""

import os
from pathlib import Path

import pytest

from ebpflb.kernel.node import sysctls
from ebpflb.kernel.node.sysctls import bridge_calls
from ebpflb.model.addresses import Family
from ebpflb.model.packet_path import SYSCTLS
from tests.kernel.node import nodes

NAME = f"ebpflb-test-{os.getpid()}-bridge"


@pytest.mark.skipif(
    not Path("/proc/sys/net/bridge").exists(), reason="this kernel is without br_netfilter"
)
@pytest.mark.parametrize("on", list(Family))
def test_each_family_has_its_own_sysctl(on: Family) -> None:
    with nodes.fresh(NAME):
        for family, name in SYSCTLS.items():
            sysctls.sysctl_path(name).write_text(f"{int(family is on)}\n")
        assert bridge_calls() == {family: family is on for family in Family}


def test_no_br_netfilter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the module there are no sysctls, and bridges hand nothing to netfilter."""
    monkeypatch.setattr(sysctls, "OWN_PROC_SYS", tmp_path)
    monkeypatch.setattr(sysctls, "HOST", tmp_path)
    assert bridge_calls() == dict.fromkeys(Family, False)
