# SPDX-License-Identifier: Apache-2.0
"""The destinations for which the kernel must be asked which source address it would select.

For IPv4 the kernel selects by the route: by its ``src``, else by the next hop. For IPv6, if the
route has no ``src``, it selects by RFC 6724: by the labels of source and destination, and by the
longest common prefix. So one answer holds for all destinations of a prefix, except those in longer
prefixes that are listed here.
"""

from collections.abc import Collection, Iterable, Mapping
from ipaddress import ip_network
from itertools import combinations

from msgspec import Struct

from ebpflb.model.addresses import Address, Family, Network, family

MOST_PREFIXES = 512  # of one device and family; the longest in excess are left out

# Prefixes that have their own label in the kernel (net/ipv6/addrlabel.c).
_LABELLED = ("fc00::/7", "fec0::/10", "2002::/16", "3ffe::/16", "2001::/32", "2001:10::/28")
# Loopback, link-local and multicast addresses: no backend behind a device has one.
_SPECIAL = tuple(map(ip_network, ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/3")))
_SPECIAL += tuple(map(ip_network, ("::/8", "fe80::/10", "ff00::/8")))


class DeviceRoute(Struct, frozen=True):
    """Destinations behind a device; ``source`` is the route's ``src``."""

    ifindex: int
    network: Network
    source: Address | None = None


class RouteSource(Struct, frozen=True):
    """The source address of masqueraded flows that leave by a device for this network."""

    ifindex: int
    network: Network
    source: Address


def prefixes(routes: Iterable[DeviceRoute], sources: Collection[Address]) -> list[Network]:
    """Return the prefixes to ask for, shortest first, for one device and family.

    Empty if all destinations get the same source, the device's only one.
    """
    named = {route.source for route in routes if route.source} | {*sources}
    if len(named) < 2:
        return []
    found = {route.network for route in routes}
    if any(family(source) == Family.IPV6 for source in named):
        found |= {*map(ip_network, _LABELLED)} | _nearer(sources)
    return sorted(found, key=lambda each: (each.prefixlen, each))[:MOST_PREFIXES]


def _nearer(sources: Iterable[Address]) -> set[Network]:
    """Return prefixes whose destinations share more bits with one source than with another."""
    found = set()
    for one, other in combinations(sources, 2):
        length = one.max_prefixlen + 1 - (int(one) ^ int(other)).bit_length()
        found |= {ip_network((each, length), strict=False) for each in (one, other)}
    return found


def example(network: Network, among: Iterable[Network]) -> Address | None:
    """Return an address of the network outside all longer prefixes in ``among``, or None."""
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
    """Return ``found`` without prefixes that have the same source as the next shorter one."""
    kept: dict[Network, Address] = {}
    for network in sorted(found, key=lambda each: each.prefixlen):
        shorter = (network.supernet(new_prefix=at) for at in range(network.prefixlen - 1, -1, -1))
        if found[network] != next((kept[each] for each in shorter if each in kept), None):
            kept[network] = found[network]
    return kept


def _address(value: int, like: Network) -> Address:
    return type(like.network_address)(value)
