# SPDX-License-Identifier: Apache-2.0
"""Networks in the maps' form, and the smallest network that holds several (entries.py)."""

from ipaddress import ip_network

from hypothesis import given
from hypothesis import strategies as some

from ebpflb.entries.services import NO_PREFIX, CoveringPrefixes, prefix_of
from ebpflb.model.addresses import Address, Family, Network

addresses = some.ip_addresses()
networks = some.builds(
    lambda address, length: ip_network((address, length % (address.max_prefixlen + 1)), False),
    addresses,
    some.integers(0, 128),
)


def number(address: Address) -> int:
    """Return an address as the maps' 128 bits."""
    return int(address) | (0xFFFF << 32 if address.version == 4 else 0)


@given(networks, addresses)
def test_prefix_means_the_network(network: Network, address: Address) -> None:
    """In 128 bits, an address equals the prefix under the mask if and only if the network contains
    it.
    """
    prefix = prefix_of(network)
    equal = not (number(address) ^ number(prefix.address)) & int(prefix.mask)
    assert equal == (number(network[0]) <= number(address) <= number(network[-1]))


@given(some.lists(addresses | networks, max_size=6))
def test_the_cover_is_the_smallest(values: list[Address | Network]) -> None:
    """The cover contains all addresses and networks of a family, but neither of its halves does."""
    covering = CoveringPrefixes()
    for value in values:
        covering.add(value)
    for family in Family:
        held = [ip_network(value) for value in values if value.version == family]
        found = covering.networks.get(family)
        assert covering.by_family[family] == (prefix_of(found) if found else NO_PREFIX)
        assert bool(found) == bool(held)
        if not found:
            continue
        assert all(network.subnet_of(found) for network in held)  # type: ignore[arg-type]
        for half in found.subnets() if found.prefixlen < found.max_prefixlen else ():
            assert not all(network.subnet_of(half) for network in held)  # type: ignore[arg-type]
