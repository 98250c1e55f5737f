# SPDX-License-Identifier: Apache-2.0
"""What a Node says of itself (kube-proxy.md 3.1, 17)."""

from ipaddress import ip_address

import pytest

from ebpflb.model import nodes, objects
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


def test_no_status() -> None:
    """A node that has not reported yet has no address."""
    bare = objects.Node(metadata=objects.Metadata(name="here"))
    assert nodes.addresses(bare) == ()
    assert nodes.primary(()) == {}


def test_primary() -> None:
    """The first address of each family counts, and the first family is the node's own."""
    listed = [ip_address(text) for text in ("fd00::7", "10.0.0.7", "fd00::8", "10.0.0.8")]
    assert list(nodes.primary(listed).items()) == [
        (Family.IPV6, listed[0]),
        (Family.IPV4, listed[1]),
    ]
