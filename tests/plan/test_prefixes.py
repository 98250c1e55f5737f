# SPDX-License-Identifier: Apache-2.0
"""Networks in the maps' form, and the smallest that holds them all (entries.py)."""

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.entries.services import (
    NO_PREFIX,
    CoveringPrefixes,
    Prefix,
    ServiceRange,
    SourceRange,
    prefix_of,
    service_range,
    smallest_network,
    source_range_key,
)
from ebpflb.model.addresses import Address, Family, Network

addresses = some.ip_addresses()
networks = some.builds(
    lambda address, length: ip_network((address, length % (address.max_prefixlen + 1)), False),
    addresses,
    some.integers(0, 128),
)


def number(address: Address) -> int:
    """The 128 bits that the maps know."""
    return int(address) | (0xFFFF << 32 if address.version == 4 else 0)


@pytest.mark.parametrize(
    ("text", "mask", "length"),
    [
        ("10.0.0.0/8", "ffff:ffff:ffff:ffff:ffff:ffff:ff00:0", 104),
        ("0.0.0.0/0", "ffff:ffff:ffff:ffff:ffff:ffff::", 96),
        ("10.1.2.3/32", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 128),
        ("fd00:30::/112", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:0", 112),
        ("::/0", "::", 0),
    ],
)
def test_forms(text: str, mask: str, length: int) -> None:
    """Masks and lengths count 128 bits, also for IPv4."""
    network = ip_network(text)
    first = network.network_address
    assert prefix_of(network) == Prefix(first, ip_address(mask))
    assert service_range(network) == ServiceRange(length, first)
    assert source_range_key(network, 7) == SourceRange(64 + length, 7, 0, first)
    assert source_range_key(network, 7, nodeport=True) == SourceRange(64 + length, 7, 1, first)


@given(networks, addresses)
def test_prefix_means_the_network(network: Network, address: Address) -> None:
    """An address is equal under the mask if and only if the network holds it, in 128 bits."""
    prefix = prefix_of(network)
    equal = not (number(address) ^ number(prefix.address)) & int(prefix.mask)
    assert equal == (number(network[0]) <= number(address) <= number(network[-1]))


def test_no_prefix() -> None:
    """No address matches NO_PREFIX under its mask."""
    assert int(NO_PREFIX.address) & ~int(NO_PREFIX.mask)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["172.30.0.1"], "172.30.0.1/32"),
        (["172.30.0.1", "172.30.0.2"], "172.30.0.0/30"),
        (["172.30.0.255", "172.30.1.0"], "172.30.0.0/23"),
        (["172.30.0.0/16", "172.30.9.9"], "172.30.0.0/16"),
        (["0.0.0.1", "255.0.0.1"], "0.0.0.0/0"),
        (["fd00::1", "fd00::8:1"], "fd00::/108"),
        (["::1", "::2"], "::/126"),
    ],
)
def test_cover(texts: list[str], expected: str) -> None:
    """Addresses and networks alike, in any order."""
    for order in (texts, texts[::-1]):
        assert str(smallest_network([ip_network(text) for text in order])) == expected


def test_cover_of_nothing() -> None:
    """No network holds nothing."""
    assert smallest_network([]) is None


@given(some.lists(networks, min_size=1), some.sampled_from(Family))
def test_cover_is_the_smallest(mixed: list[Network], family: Family) -> None:
    """The cover holds all addresses, and neither of its halves does."""
    held = [network for network in mixed if network.version == family]
    if not held:
        return
    found = smallest_network(held)
    assert found is not None and all(network.subnet_of(found) for network in held)  # type: ignore[arg-type]
    if found.prefixlen < found.max_prefixlen:
        for half in found.subnets():
            assert not all(network.subnet_of(half) for network in held)  # type: ignore[arg-type]


@given(some.lists(addresses | networks, max_size=6))
def test_span(values: list[Address | Network]) -> None:
    """Grown step by step, it is what covers all of each family."""
    covering = CoveringPrefixes()
    for value in values:
        covering.add(value)
    for family in Family:
        expected = smallest_network([value for value in values if value.version == family])
        assert covering.networks.get(family) == expected
        assert covering.by_family()[family] == (prefix_of(expected) if expected else NO_PREFIX)
