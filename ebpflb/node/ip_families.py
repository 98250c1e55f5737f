# SPDX-License-Identifier: Apache-2.0
"""Which IP families this kernel and network namespace support (kube-proxy.md 1.3)."""

from pathlib import Path

from ebpflb.model.addresses import Family

_PROC = Path("/proc")


def supported_families(proc: Path = _PROC) -> frozenset[Family]:
    """IPv6 unless the kernel is without it or it is switched off on every device."""
    try:
        disabled = (proc / "sys/net/ipv6/conf/all/disable_ipv6").read_text().strip() == "1"
    except OSError:
        disabled = True
    has_v6 = not disabled and (proc / "net/if_inet6").exists()
    return frozenset(Family) if has_v6 else frozenset({Family.IPV4})
