# SPDX-License-Identifier: Apache-2.0
"""Networks as keys and values of the maps, and the smallest prefixes that hold many of them.

All addresses in the maps have 128 bits: an IPv4 network of length n is one of length 96 + n.
"""

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv6Address, ip_network

from ebpflb.model.addresses import Address, Family, Network, family
from ebpflb.plan.entries import NO_PREFIX, Prefix, RouteKey, ServiceRange, SourceRange

_BITS = 128
_SERVICE_BITS = 64
_DEVICE_BITS = 32


@lru_cache(maxsize=256)
def prefix_of(network: Network) -> Prefix:
    """The network as an address and a mask of 128 bits."""
    ones = (1 << _BITS) - 1
    return Prefix(network.network_address, IPv6Address(ones ^ int(network.hostmask)))


def service_range(network: Network) -> ServiceRange:
    """The network as a key of map service_ranges."""
    return ServiceRange(_length(network), network.network_address)


def network_of(range: ServiceRange) -> Network | None:
    """The inverse of service_range; None for an entry that no agent can have written."""
    length = range.length - _BITS + range.address.max_prefixlen
    try:
        return ip_network((range.address, length))
    except ValueError:
        return None


def source_range(network: Network, service: int, *, nodeport: bool = False) -> SourceRange:
    """The network as a key of map source_ranges."""
    length = _SERVICE_BITS + _length(network)
    return SourceRange(length, service, int(nodeport), network.network_address)


def route_key(ifindex: int, network: Network) -> RouteKey:
    """The network as a key of map route_sources."""
    return RouteKey(_DEVICE_BITS + _length(network), ifindex, network.network_address)


def smallest_network(values: Iterable[Address | Network]) -> Network | None:
    """The smallest network that holds all values, which are of one family; None without values."""
    networks = [ip_network(value) for value in values]
    if not networks:
        return None
    low = min(networks, key=lambda network: int(network.network_address)).network_address
    high = max(int(network.broadcast_address) for network in networks)
    length = low.max_prefixlen - (int(low) ^ high).bit_length()
    return ip_network((low, length), strict=False)


class CoveringPrefixes:
    """For each family the smallest network that holds all addresses and networks ever added."""

    def __init__(self) -> None:
        self.networks: dict[Family, Network] = {}
        self._known: object = None  # what ``add_all`` was given last

    def add_all(self, networks: frozenset[Network]) -> None:
        """Costs nothing where it is the set that was given last."""
        if networks is not self._known:
            for network in networks:
                self.add(network)
            self._known = networks

    def add(self, value: Address | Network) -> None:
        before = self.networks.get(family(value))
        if before is None:
            self.networks[family(value)] = ip_network(value)
        elif value not in before:
            self.networks[family(value)] = smallest_network((before, value)) or before

    def by_family(self) -> dict[Family, Prefix]:
        """NO_PREFIX for a family of which nothing was added."""
        found = ((f, self.networks.get(f)) for f in Family)
        return {f: prefix_of(network) if network else NO_PREFIX for f, network in found}


def _length(network: Network) -> int:
    return _BITS - network.max_prefixlen + network.prefixlen
