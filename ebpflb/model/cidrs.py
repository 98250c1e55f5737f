# SPDX-License-Identifier: Apache-2.0
"""One ServiceCIDR -> the ranges that cluster IPs are taken from (kube-proxy.md 1.1, 6.3)."""

from ebpflb import errors
from ebpflb.model import addresses, objects
from ebpflb.model.addresses import Network


def read(cidr: objects.ServiceCIDR) -> tuple[Network, ...]:
    """Raises InvalidObject for a range that cannot be read."""
    listed = (cidr.spec and cidr.spec.cidrs) or []
    return tuple(_network(f"spec.cidrs[{index}]", text) for index, text in enumerate(listed))


def _network(field: str, text: str) -> Network:
    try:
        return addresses.parse_network(text)
    except ValueError as error:
        raise errors.InvalidObject(field, str(error)) from error
