# SPDX-License-Identifier: Apache-2.0
"""The families that the kernel supports (kube-proxy.md 1.3)."""

from pathlib import Path

import pytest

from ebpflb.kernel.node import sysctls
from ebpflb.model.addresses import Family


@pytest.mark.parametrize(
    ("disabled", "has_devices", "v6"),
    [("0", True, True), ("1", True, False), ("0", False, False), (None, False, False)],
)
def test_supported(tmp_path: Path, disabled: str | None, has_devices: bool, v6: bool) -> None:
    """IPv6 where /proc/net/if_inet6 is there and it is not switched off; IPv4 always."""
    switch = tmp_path / "sys/net/ipv6/conf/all/disable_ipv6"
    if disabled is not None:
        switch.parent.mkdir(parents=True)
        switch.write_text(f"{disabled}\n")
    if has_devices:
        (tmp_path / "net").mkdir()
        (tmp_path / "net/if_inet6").touch()
    expected = set(Family) if v6 else {Family.IPV4}
    assert sysctls.supported_families(tmp_path) == expected
