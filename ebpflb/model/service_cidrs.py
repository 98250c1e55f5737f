# SPDX-License-Identifier: Apache-2.0
"""One ServiceCIDR -> the ranges that cluster IPs are taken from (kube-proxy.md 1.1, 6.3)."""

from ebpflb.model import field_checks, objects
from ebpflb.model.addresses import Network, parse_network


def read(cidr: objects.ServiceCIDR) -> tuple[Network, ...]:
    """Raises InvalidObject for a range that cannot be read."""
    listed = (cidr.spec and cidr.spec.cidrs) or []
    return tuple(
        field_checks.parsed(f"spec.cidrs[{index}]", parse_network, text)
        for index, text in enumerate(listed)
    )
