# SPDX-License-Identifier: Apache-2.0
"""For which destinations the kernel has to be asked which source it would choose.

For IPv4 it chooses by the route: by its ``src``, else by the next hop. For IPv6, if the route has
no ``src``, by RFC 6724: by the labels of source and destination, and by the longest common prefix.
So one answer holds for all destinations of a prefix, except for those of longer prefixes that are
named here.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from itertools import combinations

from ebpflb.model.addresses import Address, Family, Network, family

MOST_PREFIXES = 512  # of one device and family; of more the longest are left out

# Those that get a label of their own from the kernel (net/ipv6/addrlabel.c).
_LABELLED = ("fc00::/7", "fec0::/10", "2002::/16", "3ffe::/16", "2001::/32", "2001:10::/28")
# Loopback, link-local and multicast addresses: none is that of a backend beyond a device.
_SPECIAL = tuple(map(ip_network, ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/3")))
_SPECIAL += tuple(map(ip_network, ("::/8", "fe80::/10", "ff00::/8")))


@dataclass(frozen=True, slots=True)
class DeviceRoute:
    """Destinations that are reached by a device; ``source`` is what the route itself names."""

    ifindex: int
    network: Network
    source: Address | None = None


@dataclass(frozen=True, slots=True)
class RouteSource:
    """Where masqueraded flows that leave by a device for this network come from."""

    ifindex: int
    network: Network
    source: Address


def prefixes(routes: Iterable[DeviceRoute], sources: Collection[Address]) -> list[Network]:
    """Of a device's routes in one family, and its addresses in it: the shortest prefixes first.

    None if all destinations get the same source: the device's only one.
    """
    named = {route.source for route in routes if route.source} | {*sources}
    if len(named) < 2:
        return []
    found = {route.network for route in routes}
    if any(family(source) == Family.IPV6 for source in named):
        found |= {*map(ip_network, _LABELLED)} | _nearer(sources)
    return sorted(found, key=lambda each: (each.prefixlen, each))[:MOST_PREFIXES]


def _nearer(sources: Iterable[Address]) -> set[Network]:
    """The prefixes whose destinations have more bits in common with one source than another."""
    found = set()
    for one, other in combinations(sources, 2):
        length = one.max_prefixlen + 1 - (int(one) ^ int(other)).bit_length()
        found |= {ip_network((each, length), strict=False) for each in (one, other)}
    return found


def example(network: Network, among: Iterable[Network]) -> Address | None:
    """An address of the network that is in no longer prefix of ``among``; None if there is none."""
    inner = [
        each
        for each in (*among, *_SPECIAL)
        if each.version == network.version
        and each.prefixlen > network.prefixlen
        and each.network_address in network
    ]
    beyond = (int(each.broadcast_address) + 1 for each in inner)
    last = int(network.broadcast_address)
    starts = sorted(at for at in beyond if at <= last)
    candidates = [network.network_address, *(_address(at, network) for at in starts)]
    outer = (each for each in candidates if not any(each in other for other in inner))
    return next(outer, None)


def differing(found: Mapping[Network, Address]) -> dict[Network, Address]:
    """Without the prefixes that have the same source as the next shorter one."""
    kept: dict[Network, Address] = {}
    for network in sorted(found, key=lambda each: each.prefixlen):
        shorter = (network.supernet(new_prefix=at) for at in range(network.prefixlen - 1, -1, -1))
        if found[network] != next((kept[each] for each in shorter if each in kept), None):
            kept[network] = found[network]
    return kept


def _address(value: int, like: Network) -> Address:
    return type(like.network_address)(value)
