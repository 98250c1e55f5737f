# SPDX-License-Identifier: Apache-2.0
"""The prefixes for which the kernel is asked, the destination to ask, and the answers to keep."""

from ipaddress import ip_address, ip_network

import pytest

from ebpflb.model.route_sources import DeviceRoute, differing, example, prefixes

DEFAULT = DeviceRoute(2, ip_network("0.0.0.0/0"))
ONE, OTHER = ip_address("10.1.0.1"), ip_address("10.2.0.1")


def test_one_source_needs_no_question() -> None:
    """A device's only address is the source of everything, unless a route names another one."""
    assert prefixes([DEFAULT, DeviceRoute(2, ip_network("10.1.0.0/24"), ONE)], [ONE]) == []
    named = DeviceRoute(2, ip_network("10.9.0.0/16"), OTHER)
    assert prefixes([DEFAULT, named], [ONE]) == [DEFAULT.network, named.network]


def test_ipv6_is_asked_where_sources_differ() -> None:
    """IPv6 is asked where sources differ: by routes, by RFC 6724's labels, or by common bits."""
    ours = [ip_address("2001:db8::1"), ip_address("2a00::1")]
    found = prefixes([DeviceRoute(2, ip_network("::/0"))], ours)
    assert {*map(str, found)} >= {"::/0", "fc00::/7", "2000::/5", "2800::/5"}


@pytest.mark.parametrize(
    ("network", "among", "expected"),
    [
        ("0.0.0.0/0", [], "1.0.0.0"),
        ("10.0.0.0/8", ["10.0.0.0/8", "10.0.0.0/9"], "10.128.0.0"),
        ("10.0.0.0/8", ["10.0.0.0/9", "10.128.0.0/10"], "10.192.0.0"),
        ("10.0.0.0/31", ["10.0.0.0/32", "10.0.0.1/32"], None),
        ("::/0", ["fc00::/7"], "100::"),
    ],
)
def test_example(network: str, among: list[str], expected: str | None) -> None:
    """The result is an address of the prefix outside all longer ones; None if they cover it."""
    found = example(ip_network(network), map(ip_network, among))
    assert found == (ip_address(expected) if expected else None)


def test_only_differences_are_kept() -> None:
    """A prefix that has the source of the next shorter one is left out."""
    answers = {
        "10.0.0.0/8": ONE,
        "10.1.0.0/16": ONE,
        "10.2.0.0/16": OTHER,
        "10.2.3.0/24": OTHER,
        "10.2.4.0/24": ONE,
    }
    found = differing({ip_network(text): source for text, source in answers.items()})
    assert [*map(str, found)] == ["10.0.0.0/8", "10.2.0.0/16", "10.2.4.0/24"]
