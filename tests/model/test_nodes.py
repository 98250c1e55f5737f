# SPDX-License-Identifier: Apache-2.0
"""The facts that a Node object gives (kube-proxy.md 3.1, 17)."""

from ipaddress import ip_address
from typing import Any

import pytest

from ebpflb.model import nodes
from ebpflb.model.addresses import Family
from tests.model import builders


@pytest.mark.parametrize(
    ("labels", "zone"),
    [({nodes.ZONE_LABEL: "z1"}, "z1"), ({nodes.ZONE_LABEL: ""}, ""), ({}, ""), (None, "")],
)
def test_zone(labels: dict[str, str] | None, zone: str) -> None:
    """The zone is the label's value; without the label there is none."""
    assert nodes.zone(builders.node(labels=labels)) == zone


def test_internal_addresses_first() -> None:
    """InternalIPs come before ExternalIPs; names and unreadable addresses are left out."""
    node = builders.node(
        ("Hostname", "192.0.2.99"),
        ("ExternalIP", "192.0.2.1"),
        ("InternalIP", "x"),
        ("InternalIP", "10.0.0.7"),
        ("InternalIP", "fd00::7"),
    )
    assert [str(each) for each in nodes.addresses(node)] == ["10.0.0.7", "fd00::7", "192.0.2.1"]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"podCIDRs": ["10.1.0.0/24", "fd00:1::/64"]}, ["10.1.0.0/24", "fd00:1::/64"]),
        (
            {"podCIDRs": ["fd00:1::/64", "10.1.0.0/24", "10.2.0.0/24"]},
            ["fd00:1::/64", "10.1.0.0/24"],
        ),
        ({"podCIDRs": ["10.1.0.0/24"], "podCIDR": "10.9.0.0/24"}, ["10.1.0.0/24"]),
        ({"podCIDR": "10.9.0.0/24"}, ["10.9.0.0/24"]),
        ({"podCIDRs": [], "podCIDR": "10.9.0.0/24"}, ["10.9.0.0/24"]),
        ({"podCIDRs": ["x", "10.1.0.7/24"]}, ["10.1.0.0/24"]),
        ({"podCIDRs": None}, []),
        ({}, []),
    ],
)
def test_pod_cidrs(spec: dict[str, Any], expected: list[str]) -> None:
    """The first of each family, without the unreadable; podCIDR stands in for missing podCIDRs."""
    assert [str(each) for each in nodes.pod_cidrs(builders.node(**spec))] == expected


def test_primary() -> None:
    """The first address of each family counts, and the first family is the node's own."""
    listed = [ip_address(text) for text in ("fd00::7", "10.0.0.7", "fd00::8", "10.0.0.8")]
    assert list(nodes.primary_addresses(listed).items()) == [
        (Family.IPV6, listed[0]),
        (Family.IPV4, listed[1]),
    ]
