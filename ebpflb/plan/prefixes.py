# SPDX-License-Identifier: Apache-2.0
"""Networks as the datapath keeps them, and the smallest one that holds them all.

The maps know addresses of 128 bits only, so an IPv4 network of length n is one of 96 + n bits.
"""

from collections.abc import Iterable
from ipaddress import IPv6Address, ip_network

from ebpflb.model.addresses import Address, Family, Network, family
from ebpflb.plan.entries import NO_PREFIX, Prefix, ServiceRange, SourceRange

_BITS = 128
_SERVICE_BITS = 32


def prefix_of(network: Network) -> Prefix:
    """The network as an address and a mask of 128 bits."""
    ones = (1 << _BITS) - 1
    return Prefix(network.network_address, IPv6Address(ones ^ int(network.hostmask)))


def service_range(network: Network) -> ServiceRange:
    """The network as a key of map service_ranges."""
    return ServiceRange(_length(network), network.network_address)


def source_range(network: Network, service: int) -> SourceRange:
    """The network as a key of map source_ranges."""
    return SourceRange(_SERVICE_BITS + _length(network), service, network.network_address)


def smallest_network(values: Iterable[Address | Network]) -> Network | None:
    """The smallest network that holds all of these, which are of one family; None of none."""
    networks = [ip_network(value) for value in values]
    if not networks:
        return None
    low = min(networks, key=lambda network: int(network.network_address)).network_address
    high = max(int(network.broadcast_address) for network in networks)
    length = low.max_prefixlen - (int(low) ^ high).bit_length()
    return ip_network((low, length), strict=False)


class CoveringPrefixes:
    """Of each family the smallest network that holds all that it was ever given."""

    def __init__(self) -> None:
        self.networks: dict[Family, Network] = {}

    def add(self, value: Address | Network) -> None:
        held = self.networks.get(family(value))
        if held is None:
            self.networks[family(value)] = ip_network(value)
        elif value not in held:
            self.networks[family(value)] = smallest_network((held, value)) or held

    def by_family(self) -> dict[Family, Prefix]:
        """NO_PREFIX for a family that it was given nothing of."""
        found = ((f, self.networks.get(f)) for f in Family)
        return {f: prefix_of(network) if network else NO_PREFIX for f, network in found}


def _length(network: Network) -> int:
    return _BITS - network.max_prefixlen + network.prefixlen
