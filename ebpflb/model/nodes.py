# SPDX-License-Identifier: Apache-2.0
"""Read a Node, and ServiceCIDRs, for the service proxy (kube-proxy.md 5, 13.1, 17)."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from ebpflb.model import addresses as parsing
from ebpflb.model import field_checks, objects
from ebpflb.model.addresses import Address, Family, Network, parse_network

# One ServiceCIDR -> the ranges of cluster IPs (kube-proxy.md 1.1, 6.3).


def read_service_cidrs(cidr: objects.ServiceCIDR) -> tuple[Network, ...]:
    """Return the ranges. Raises InvalidObject for an unreadable range."""
    listed = (cidr.spec and cidr.spec.cidrs) or []
    return tuple(
        field_checks.parsed(f"spec.cidrs[{index}]", parse_network, text)
        for index, text in enumerate(listed)
    )


ZONE_LABEL = "topology.kubernetes.io/zone"
DELETION_TAINT = "ToBeDeletedByClusterAutoscaler"

_USED_TYPES = ("InternalIP", "ExternalIP")  # in order of preference

_Parsed = TypeVar("_Parsed")


def zone(node: objects.Node) -> str:
    """Return the zone; "" means none, which turns zone hints off (kube-proxy.md 3.1)."""
    return (node.metadata.labels or {}).get(ZONE_LABEL, "")


def eligible(node: objects.Node) -> bool:
    """Whether load balancers may send traffic to the node.

    A node that is being deleted, or about to be, gets none. Only the autoscaler's taint counts,
    with any value and effect (kube-proxy.md 13.1).
    """
    taints = (node.spec and node.spec.taints) or []
    to_be_deleted = any(taint.key == DELETION_TAINT for taint in taints)
    return not node.metadata.deletion_timestamp and not to_be_deleted


def addresses(node: objects.Node) -> tuple[Address, ...]:
    """Return the readable addresses: internal before external, in the order of the status."""
    listed = (node.status and node.status.addresses) or []
    return tuple(
        address
        for used in _USED_TYPES
        for entry in listed
        if entry.type == used and (address := _readable(parsing.parse_address, entry.address))
    )


def primary_addresses(candidates: Iterable[Address]) -> dict[Family, Address]:
    """Return the first address of each family; the first family is the node's primary one."""
    first: dict[Family, Address] = {}
    for address in candidates:
        first.setdefault(parsing.family(address), address)
    return first


def pod_cidrs(node: objects.Node) -> tuple[Network, ...]:
    """Return the ranges of its pods' addresses: the first readable one of each family.

    spec.podCIDR counts only if spec.podCIDRs is empty.
    """
    spec = node.spec or objects.NodeSpec()
    first: dict[Family, Network] = {}
    for text in spec.pod_cidrs or [spec.pod_cidr]:
        if network := _readable(parsing.parse_network, text):
            first.setdefault(parsing.family(network), network)
    return tuple(first.values())


def _readable(parse: Callable[[str], _Parsed], text: str) -> _Parsed | None:
    try:
        return parse(text)
    except ValueError:
        return None
